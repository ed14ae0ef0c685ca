// A kernel that touches memory it may not: one line that says which thread it was, before the process dies as it would anyway.
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
