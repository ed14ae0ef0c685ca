// Included at the end of a kernel's generated source: the entry that the scheduler calls, and what the loader checks.
#pragma once

namespace mkernel {}

namespace mkcpu_entry {
using namespace mkernel;
template <class Parameters>
void call(void (*kernel)(Parameters), const void* parameters) {
  kernel(*static_cast<const Parameters*>(parameters));
}
template <class Parameters>
constexpr uint32_t size(void (*)(Parameters)) {
  return sizeof(Parameters);
}
inline void run(const void* parameters) { call(&mkernel_entry, parameters); }
constexpr uint32_t kParameterBytes = size(&mkernel_entry);
}  // namespace mkcpu_entry

MKC_API void mkernel_invoke(const void* parameters) { mkcpu_entry::run(parameters); }
MKC_API uint32_t mkernel_parameter_bytes() { return mkcpu_entry::kParameterBytes; }
