"""``python -m rpeg_core``, the same as ``rpeg``."""

from __future__ import annotations

import sys

from rpeg_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
