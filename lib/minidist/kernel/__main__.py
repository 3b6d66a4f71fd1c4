"""Entry point of the kernel specs: read the command line, serve until told to stop."""

from __future__ import annotations

import sys

from minidist.kernel.front import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
