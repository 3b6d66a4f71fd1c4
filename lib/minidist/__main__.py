"""`python -m minidist`, and the command `minidist`: see `minidist.plan.cli`."""

from __future__ import annotations

import sys


def main() -> int:
    from minidist.plan.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
