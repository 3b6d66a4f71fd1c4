"""`python -m minidist.train`, as one process or on the ranks of torchrun."""

from __future__ import annotations

import os
import sys

from minidist.train import parse_args, train
from minidist.train.program import check_world


def main() -> None:
    config = parse_args()
    try:
        check_world(config)
    except ValueError as error:
        # One line instead of one traceback per rank.
        if os.environ.get("RANK", "0") == "0":
            print(f"python -m minidist.train: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    train(config)


if __name__ == "__main__":
    main()
