"""Says that it runs, and ends when told to."""

import time
from pathlib import Path

Path("/mnt/job/started").touch()
end = time.monotonic() + 60
while not Path("/mnt/job/go").exists() and time.monotonic() < end:
    time.sleep(0.05)
raise SystemExit(0 if Path("/mnt/job/go").exists() else 1)
