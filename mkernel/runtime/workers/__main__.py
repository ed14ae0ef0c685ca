"""``python -m mkernel.runtime.workers FD PARENT``: a rank of ``mk.launch``. Started by its pool, of no use by hand."""

from __future__ import annotations

import sys

from mkernel.runtime.workers.serve import serve

if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), int(sys.argv[2])))
