"""``python -m mkernel doctor``, its output, and success whatever else the machine lacks (it has no GPU)."""

import subprocess
import sys

done = subprocess.run([sys.executable, "-m", "mkernel", "doctor"], capture_output=True, text=True, check=False)
print(done.stdout)
print(done.stderr, file=sys.stderr)
