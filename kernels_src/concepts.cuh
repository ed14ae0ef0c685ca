// Words for concepts. A concept says, for the compiler and the reader, what a template asks of the type that it is given, and is checked where the
// template is used. CCCL has the same in <cuda/std/concepts>, which takes NVRTC 0.09 s; this takes none.
#pragma once

namespace mkernel {

namespace detail {
template <class, class>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;
}  // namespace detail
template <class A, class B>
concept Same = detail::kSame<A, B>;

}  // namespace mkernel
