"""The autograder's throughput beside what one would do without it, on lab 1 and its three ranks.

Phases: a class block by block, in the sandbox and without, beside a papermill per rank and beside
stock nbgrader; one submission, beside its code as a plain script under torchrun; the memory of the
grader over a long run.

Each arm grades the same submissions, whose bytes are all different, in a course of its own, so
nothing comes from a journal. The time of a block is that of one command, its start included:
`autograder grade --no-gradebook` starts once per block, nbgrader too (which fills its gradebook),
and torchrun once per submission. A larger --block spreads the autograder's start over more of
them. The papermill peer runs as many submissions at once as `autograder grade` does; nbgrader
knows only one after the other. Both peers run whole notebooks, as they would; the autograder
leaves the lab's demonstrations out. With --no-demos the peers' notebooks lack them too. The plain
script has only what the grader runs.

Every score is compared with what the submission has to get.

    python benchmarks/grading.py [--quick] [--submissions 16] [--block 4] [--no-demos] [--many 60]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from grading_peers import (
    DEADLINE_S,
    ROOT,
    Handed,
    PapermillPerRank,
    StockNbgrader,
    check_scores,
    hand_in,
    in_blocks,
    make_class,
    run,
    run_script,
)
from harness import RESULTS, Row, row, write
from kernel import PEER_TRIES, in_turn, timed

from autograder.batch.grade_class import default_jobs
from autograder.box.sandbox import probe_support
from autograder.course.course import Course
from autograder.criteria import get_lab
from autograder.submission.attempt import grade
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission

LAB = "lab1_ddp"
# For the memory of a long run: the bundled lab whose submissions take the shortest time. It is
# graded like any other, in a box, on ranks, with a referee.
SHORT_LAB = "bonus_ring_all_reduce"
KERNEL_DIED = "Kernel died before replying"  # so says jupyter_client


class Grader:
    """`autograder grade` in a course of its own."""

    def __init__(self, folder: Path, *, sandboxed: bool = True, lab: str = LAB) -> None:
        self.folder, self.sandboxed, self.lab = folder, sandboxed, lab
        folder.mkdir()
        shutil.copytree(ROOT / "labs" / lab, folder / "labs" / lab)
        shutil.copy(ROOT / "nbgrader_config.py", folder)
        self.env = {"AUTOGRADER_COURSE": str(folder)}
        if not sandboxed:  # it is used wherever it can be found
            self.env |= {"PATH": path_without("bwrap", folder), "AUTOGRADER_SANDBOX": "bwrap"}
        run(["-m", "autograder", "init"], folder, env=self.env)

    def command(self, submitted: Path) -> list[str]:
        """Arguments for Python; the records go to records.json in the course."""
        options = ["--no-gradebook", "--json", str(self.folder / "records.json")]
        options += [] if self.sandboxed else ["--trusted"]
        return ["-m", "autograder", "grade", str(submitted), "--lab", self.lab, *options]

    def grade(self, submitted: Path) -> dict[str, float]:
        """Grades all submissions in a folder; scores by student."""
        run(self.command(submitted), self.folder, env=self.env)
        return self.scores()

    def scores(self) -> dict[str, float]:
        """Scores by student, of the last command; why, is left in build/bench."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.folder / "records.json", RESULTS / "grading_records.json")
        records = json.loads((self.folder / "records.json").read_text())
        wrong = [r["student"] for r in records if r["sandboxed"] != self.sandboxed]
        if wrong:
            raise RuntimeError(f"sandboxed should be {self.sandboxed}, and is not: {wrong}")
        return {record["student"]: record["score"] for record in records}


def path_without(program: str, folder: Path) -> str:
    """$PATH with everything that is in it but `program`."""
    parts = []
    for number, part in enumerate(os.environ["PATH"].split(os.pathsep)):
        if Path(part, program).exists():
            links = folder / "bin" / str(number)
            links.mkdir(parents=True)
            for file in Path(part).iterdir():
                if file.name != program:
                    (links / file.name).symlink_to(file)
            part = str(links)
        parts.append(part)
    return os.pathsep.join(parts)


def a_class(handed: Sequence[Handed], size: int, demos: bool, folder: Path) -> list[Row]:
    """Seconds per submission of each arm, block by block; every second block runs backwards."""
    num_ranks = get_lab(LAB).grading_world_size
    jobs = default_jobs(num_ranks)
    arms: dict[str, Callable[[Path], dict[str, float]]] = {
        "ours": Grader(folder / "ours").grade,
        "trusted": Grader(folder / "trusted", sandboxed=False).grade,
        "papermill": PapermillPerRank(LAB, num_ranks, folder / "papermill", jobs, demos).grade,
        "nbgrader": StockNbgrader(LAB, num_ranks, folder / "nbgrader", demos).grade,
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    blocks = in_blocks(handed, size)
    for number, block in enumerate(blocks):
        for name in list(arms) if number % 2 == 0 else reversed(list(arms)):
            submitted = hand_in(block, LAB, folder / "submitted" / f"{name}{number}")
            tries = PEER_TRIES if name == "papermill" else 1
            scores, seconds = timed(partial(arms[name], submitted), tries, KERNEL_DIED)
            times[name].append(seconds / len(block))
            check_scores(name, scores, block)
            print(
                f"block {number + 1} of {len(blocks)}, {name}: {times[name][-1]:.1f} s each",
                flush=True,
            )
    per_minute = {name: 60 / statistics.median(each) for name, each in times.items()}
    print("submissions per minute:", *(f"{name} {n:.2f}" for name, n in per_minute.items()))
    what = f"{sum(map(len, blocks))} submissions"
    whole = "" if demos else ", no demos"
    return [
        row(f"{what}, papermill per rank{whole} (limit 0.5)", times, peer="papermill", goal=0.25),
        row(f"{what}, stock nbgrader{whole} (limit 0.67)", times, peer="nbgrader", goal=0.33),
        row(f"{what}, without the sandbox", times, peer="trusted", goal=1.03),
    ]


def one_submission(rounds: int, folder: Path) -> list[Row]:
    """One right submission in a grader that runs, and by a whole command; the peer is a script.

    And the same in a grader that runs, with the sandbox beside without: less noise than a class.
    """
    lab = get_lab(LAB)
    handed = iter(make_class(LAB, 4 * (rounds + 1), varied=()))
    grader, warm, scripts = Grader(folder / "one"), Grader(folder / "warm"), folder / "scripts"
    scripts.mkdir()

    def fresh() -> tuple[Handed, Path]:
        each = next(handed)
        return each, hand_in([each], LAB, folder / "one_by_one" / each.student)

    def in_process(sandboxed: bool) -> float:
        each, submitted = fresh()
        path = submitted / each.student / LAB / f"{LAB}.ipynb"
        class_run = ClassRun(Course(warm.folder), LAB, lab.grading_world_size, sandboxed)
        began = time.perf_counter()
        record = grade(Submission(each.student, path), class_run)
        seconds = time.perf_counter() - began
        check_scores("one submission", {each.student: record.score or 0.0}, [each])
        if record.sandboxed != sandboxed:
            raise RuntimeError(f"one submission: sandboxed should be {sandboxed}")
        return seconds

    def command() -> float:
        each, submitted = fresh()
        began = time.perf_counter()
        scores = grader.grade(submitted)
        seconds = time.perf_counter() - began
        check_scores("a command", scores, [each])
        return seconds

    def script() -> float:
        each = next(handed)
        began = time.perf_counter()
        run_script(each, lab.grading_world_size, scripts)
        return time.perf_counter() - began

    in_process(True)  # what is imported on first use
    arms = {
        "command": command,
        "open": lambda: in_process(False),
        "ours": lambda: in_process(True),
        "peer": script,
    }
    times = in_turn(arms, rounds)
    return [
        row("one submission, beside a plain script (limit 1.2)", times, goal=0.8),
        row("one submission, whole command, same script", times, ours="command", goal=0.8),
        row("one submission, without the sandbox", times, peer="open", goal=1.03),
    ]


def memory(num: int, folder: Path) -> list[Row]:
    """Peak memory of one long `autograder grade`, at its end beside early on.

    Counted are the command's process and its workers (VmHWM), not the boxes: what a submission
    uses is its own. Early is after the first tenth, and after 20 submissions at least.
    """
    grader = Grader(folder / "memory", lab=SHORT_LAB)
    handed = make_class(SHORT_LAB, num, varied=())
    submitted = hand_in(handed, SHORT_LAB, folder / "many")
    early = min(max(20, num // 10), num // 2)
    samples, seconds = watch(grader, submitted, num)
    check_scores("the long run", grader.scores(), handed)
    print(f"{num} submissions of {SHORT_LAB}: {60 * num / seconds:.1f} per minute")
    first = next(sum(sizes) for done, sizes in samples if done >= early)
    # The workers are gone when the report is made, so what counts is the most that there was.
    done, most = max(samples, key=lambda sample: sum(sample[1]))
    last = sum(most)
    print(f"the most was after {done}, in MiB:", *(size >> 20 for size in most))
    name = f"memory after {num}, beside {early} ({SHORT_LAB})"
    return [row(name, {"ours": [last], "peer": [first]}, unit="bytes", goal=1.05)]


def watch(grader: Grader, submitted: Path, num: int) -> tuple[list[tuple[int, list[int]]], float]:
    """Runs one command over `num` submissions and looks at its processes again and again.

    Returns:
        (submissions done, peak bytes of each process) for each look, and the seconds until the
        last submission was done.
    """
    journal = Course(grader.folder).journal_path
    samples: list[tuple[int, list[int]]] = []
    before: set[int] = set()
    began = time.monotonic()
    seconds = DEADLINE_S + 60.0 * num
    with (grader.folder / "said.txt").open("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *grader.command(submitted)],
            cwd=grader.folder,
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
            env=os.environ | grader.env,
        )
        try:
            while process.poll() is None:
                if time.monotonic() - began > DEADLINE_S + 60.0 * num:
                    raise RuntimeError(f"{num_graded(journal)} of {num} are graded, and no more")
                now = peak_bytes(process.pid)
                # What a worker has forked looks like the worker until it runs another program.
                lasting = [size for pid, size in now.items() if pid in before]
                before = set(now)
                samples.append((num_graded(journal), lasting))
                if samples[-1][0] == num:
                    seconds = min(seconds, time.monotonic() - began)
                time.sleep(0.2)
        finally:
            process.terminate()
            process.wait()
        said.seek(0)
        if process.returncode:
            raise RuntimeError(f"{num} submissions ended with {process.returncode}: {said.read()}")
    return samples, seconds


def num_graded(journal: Path) -> int:
    """How many submissions a journal has a record of."""
    if not journal.exists():
        return 0
    with journal.open("rb") as lines:
        return sum(b'"kind":"submission"' in line for line in lines)


def peak_bytes(pid: int) -> dict[int, int]:
    """Peak resident memory of a grader's processes, by pid: itself and its workers."""
    found, todo = {}, [str(pid)]
    while todo:  # a worker is a child of what it was forked from
        each = todo.pop()
        try:
            ours = (
                each == str(pid) or b"multiprocessing" in Path(f"/proc/{each}/cmdline").read_bytes()
            )
            if ours:
                todo += Path(f"/proc/{each}/task/{each}/children").read_text().split()
            status = Path(f"/proc/{each}/status").read_text()
        except OSError:
            continue  # it has ended since
        if ours and "VmHWM:" in status:
            found[int(each)] = int(status.partition("VmHWM:")[2].split()[0]) << 10
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--quick", action="store_true", help="one block of two: does it run at all?"
    )
    parser.add_argument("--submissions", type=int, default=16, help="in the class (16)")
    parser.add_argument("--block", type=int, default=4, help="submissions per command (4)")
    parser.add_argument("--rounds", type=int, default=5, help="of one submission (5)")
    parser.add_argument("--many", type=int, default=60, help="in the long run (60); 1000, say")
    parser.add_argument("--no-demos", action="store_true", help="peers leave them out too")
    parser.add_argument("--only", choices=("class", "one", "memory"), help="one part of it")
    options = parser.parse_args()
    if options.quick:
        options.submissions = options.block = 2
        options.rounds, options.many = 1, 4
    if not probe_support().works:
        raise SystemExit(f"nothing to compare with: {probe_support().reason}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="md-bench-") as name:
        folder = Path(name)
        if options.only in (None, "class"):
            handed = make_class(LAB, options.submissions)
            rows += a_class(handed, options.block, not options.no_demos, folder)
        if options.only in (None, "one"):
            rows += one_submission(options.rounds, folder)
        if options.only in (None, "memory"):
            rows += memory(options.many, folder)
    write(rows, "grading")


if __name__ == "__main__":
    main()
