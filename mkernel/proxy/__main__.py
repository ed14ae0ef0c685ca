"""``python -m mkernel.proxy FD``: an engine's process. ``mkernel.proxy.process`` starts it; it is of no use by hand."""

from __future__ import annotations

import sys

from mkernel.proxy.process import serve

if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1])))
