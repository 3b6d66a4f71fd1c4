"""Measure on this machine's NVIDIA GPUs, and write one JSON file: `python benchmarks/gpu`.

Offline, and with nothing installed but torch, numpy and cloudpickle (the labs need the course's
other packages). Exit status: 0 when everything could be measured, 1 when something could not (the
file says what, and why), 2 for wrong usage, 3 without a CUDA device, when nothing is written.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A folder that is run puts itself on the path, where its files could hide those of other packages.
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(p for p in sys.path if Path(p).resolve() != HERE)]

from gpu.runner import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main(__doc__))
