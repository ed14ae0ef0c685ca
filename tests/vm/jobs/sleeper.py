"""Says that it runs, and ends when told to."""

import os
import time
from pathlib import Path

job = Path(os.environ["TEST_JOB"])
(job / "started").touch()
end = time.monotonic() + 60
while not (job / "go").exists() and time.monotonic() < end:
    time.sleep(0.05)
raise SystemExit(0 if (job / "go").exists() else 1)
