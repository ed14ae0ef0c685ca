#include "crash.hpp"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <mutex>

#include "model.hpp"

namespace mkcpu {

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
constexpr int kNumSignals = sizeof(kSignals) / sizeof(kSignals[0]);
constexpr size_t kAlternateBytes = 64 * 1024;  // the fiber's own stack may be what has run out

std::mutex mutex;
int users = 0;
struct sigaction before[kNumSignals];

struct AlternateStack {
  alignas(16) char bytes[kAlternateBytes];
};
thread_local std::unique_ptr<AlternateStack> alternate;
thread_local stack_t alternate_before;
thread_local int nested = 0;

void explain(int signal, siginfo_t* info, void*) {
  // The scheduler's state is sound: the fault is the kernel's. Formatting is not safe in a handler in general; this process is about to
  // die.
  const Scheduler* s = current_scheduler();
  if (s != nullptr && s->current != nullptr) {
    const Fiber& fiber = *s->current;
    const Cta& cta = *fiber.cta;
    const char* address = static_cast<const char*>(info->si_addr);
    const bool overrun = s->stacks.guards(address) && address < fiber.stack;
    char what[96] = "touched memory that it may not";
    if (signal == SIGFPE) {
      snprintf(what, sizeof what, "divided an integer by zero");
    } else if (overrun) {
      snprintf(what, sizeof what, "touched memory beyond the end of its stack (%zu bytes)", s->stacks.block_bytes());
    } else if (s->shared_guards(address)) {
      snprintf(what, sizeof what, "touched shared +0x%llx, of %u bytes", static_cast<unsigned long long>(address - cta.shared),
               cta.shared_bytes);
    }
    char text[256];
    const int bytes = snprintf(text, sizeof text, "mkernel, target cpu: rank %u, CTA %u, thread %u %s (address %p)\n", cta.launch->rank,
                               cta.index, fiber.thread, what, info->si_addr);
    if (bytes > 0) (void)!write(STDERR_FILENO, text, static_cast<size_t>(bytes));
  }
  for (int i = 0; i < kNumSignals; ++i) sigaction(kSignals[i], &before[i], nullptr);  // the faulting instruction runs again and meets these
}

}  // namespace

FaultHandler::FaultHandler() {
  if (tsan::active() || nested++ > 0) return;
  if (alternate == nullptr) alternate = std::make_unique<AlternateStack>();
  stack_t stack{};
  stack.ss_sp = alternate->bytes;
  stack.ss_size = kAlternateBytes;
  sigaltstack(&stack, &alternate_before);
  const std::lock_guard<std::mutex> lock(mutex);
  if (users++ > 0) return;
  struct sigaction action = {};
  action.sa_sigaction = explain;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < kNumSignals; ++i) sigaction(kSignals[i], &action, &before[i]);
}

FaultHandler::~FaultHandler() {
  if (tsan::active() || --nested > 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (--users == 0) {
      for (int i = 0; i < kNumSignals; ++i) sigaction(kSignals[i], &before[i], nullptr);
    }
  }
  sigaltstack(&alternate_before, nullptr);
}

}  // namespace mkcpu
