// If a kernel touches memory that it may not, one line names the thread, before the process dies as it would anyway.
#pragma once

namespace mkcpu {

// While one of these exists, this thread's segmentation faults are explained. Handlers from before are put back, and called after it.
class FaultHandler {
 public:
  FaultHandler();
  ~FaultHandler();
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;
};

}  // namespace mkcpu
