"""The solutions of all labs and bonuses on as many ranks as there are GPUs: over NCCL, all on GPUs.

`labs` grades them as a class is graded, on three ranks, so on a machine with one GPU they run on
the CPU. Several are graded at once here, and share the GPUs, so nothing that is timed is judged.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu.device import count_ranks, num_gpus
from gpu.labs import make_course, openly, require_packages, run_python
from gpu.recorder import NotHereError, Recorder
from gpu.rows import ROOT
from gpu.sizes import Sizes

TIMED = ("amp_gpu_speed", "prof_gpu_efficiency")  # criteria that want a GPU for themselves
ENDING_S = 15.0  # of the part's time: for what has to be ended


def measure(recorder: Recorder, sizes: Sizes, labs: Sequence[str] | None = None) -> None:
    """All rows of the part; `labs` are all labs and bonuses by default."""
    ranks = num_gpus() if sizes.device == "cuda" else 1
    labs = labs or sorted(path.parent.name for path in ROOT.glob("solutions/*/*.ipynb"))
    try:
        require_packages()
    except NotHereError as error:
        recorder.skip("all solutions", str(error))
        return
    with tempfile.TemporaryDirectory(prefix="labs-") as folder:
        grade_all(recorder, Path(folder), ranks, labs)


def grade_all(recorder: Recorder, course: Path, ranks: int, labs: Sequence[str]) -> None:
    """A row per lab: does its solution get full marks?"""
    make_course(course)

    def grade(lab: str) -> dict[str, Any]:
        if (left_s := recorder.left_s - ENDING_S) < 0:
            raise TimeoutError("no time was left for it")
        out = course / f"{lab}.json"
        run_python(course, openly(course, lab, out, ranks), left_s)
        return json.loads(out.read_text("utf-8"))[0]

    def check(lab: str, record: Future[dict[str, Any]]) -> None:
        what = f"{lab}: full marks on {count_ranks(ranks)}"
        try:
            criteria = record.result()["criteria"]
        except TimeoutError as error:
            recorder.fail(what, str(error), status="timeout")
            return
        wrong = {
            each["name"]: each["message"][:200]
            for each in criteria
            if each["status"] not in ("PASS", "BLOCKED") and each["name"] not in TIMED
        }
        recorder.check(what, not wrong, f"it loses {wrong}")

    at_once = max(1, (os.cpu_count() or 1) // (2 * ranks + 2))
    with ThreadPoolExecutor(at_once) as pool:
        for lab, record in [(lab, pool.submit(grade, lab)) for lab in labs]:
            recorder.measure(lab, functools.partial(check, lab, record))
