"""``python -m mkernel``: the same as the console script ``mkernel``."""

from __future__ import annotations

import sys

from mkernel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
