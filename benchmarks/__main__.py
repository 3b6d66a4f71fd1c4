"""Run every benchmark of this folder in turn, then print all their tables: `python benchmarks`.

`--quick` is passed on. A file is a benchmark when it imports `harness.write`. Each runs in a
process of its own; one that fails is named at the end, after the others have run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness import RESULTS, find_benchmarks, machine, main_arguments

# Long enough for a slow machine; a benchmark that hangs must not hang `make bench`.
DEADLINE_S = 3600.0


def main() -> int:
    quick = main_arguments(__doc__).quick
    folder = Path(__file__).resolve().parent
    files = find_benchmarks(folder)
    # Tables of an earlier run must not pass for this one's.
    for path in files:
        for old in RESULTS.glob(f"{path.stem}.*"):
            old.unlink()
    failed = []
    for path in files:
        print(f"\n== {path.name}", flush=True)
        command = [sys.executable, str(path), *(["--quick"] if quick else [])]
        try:
            if subprocess.run(command, timeout=DEADLINE_S).returncode != 0:
                failed.append(path.name)
        except subprocess.TimeoutExpired:
            failed.append(f"{path.name} (stopped after {DEADLINE_S:g} s)")
    print(f"\n== all benchmarks: {machine()}")
    for path in files:
        table = RESULTS / f"{path.stem}.txt"
        if table.exists():
            print(f"\n{path.stem}\n{table.read_text('utf-8').rstrip()}")
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
