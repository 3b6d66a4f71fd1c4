"""Criteria with extra points: BLOCKED without a GPU, at no cost; on top of 100 with one.

What they measure is run here on the CPU, at small sizes and with made-up numbers for the GPU's
memory: that what is observed reaches the judge. Nothing here says how fast a GPU is.
"""

from __future__ import annotations

import ast
import contextlib
import json
from dataclasses import replace

import nbformat
import numpy as np
import pytest
import torch
from conftest import NO_GPU
from course import ROOT, TestCourse, statuses
from lab_helper import make_case
from made_records import made_record
from nbgrader.api import Gradebook
from referee_client import answer, ask, dial

import autograder.inside.probe as probe
from autograder.criteria import get_lab, lab_names
from autograder.criteria.common import gpu_meter
from autograder.criteria.criterion import Case, Context, HardwareMissingError, Status, Verdict
from autograder.criteria.lab3_fsdp import gpu as fsdp_gpu
from autograder.criteria.lab4_amp import gpu
from autograder.criteria.lab6_profiling import gpu as prof_gpu
from autograder.gradebook.database import Cell, Grade, Person
from autograder.gradebook.lms_files import Column, gradescope_result
from autograder.gradebook.preprocessors import SavePoints, verdict_output
from autograder.proof.zoo import load_zoo
from autograder.referee.referee import Referee, draw_for
from autograder.report.terminal import reason, rich_table
from minidist.launch import run

EXTRA = [(lab, c) for lab in map(get_lab, lab_names()) for c in lab.criteria if c.extra]
N = 2


# --- BLOCKED, and points on top ------------------------------------------------------------------


def test_full_marks_need_no_gpu():
    assert {c.name for _, c in EXTRA} == {
        "amp_gpu_speed",
        "amp_gpu_memory",
        "fsdp_gpu_memory",
        "prof_gpu_efficiency",
    }
    for lab, criterion in EXTRA:
        assert lab.max_score == 100
        assert criterion.points > 0
        assert criterion.listed_points == 0


@pytest.mark.parametrize(
    ("needs", "count", "missing"),
    [
        ("cuda", 0, "needs 1 CUDA device; torch sees none"),
        ("cuda", 1, ""),
        ("cuda per rank", 2, "needs 3 CUDA devices; torch sees 2"),
        ("cuda per rank", 3, ""),
    ],
)
def test_a_rank_says_what_is_missing(needs, count, missing, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(probe, "_cuda_works", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    if missing:
        with pytest.raises(HardwareMissingError, match=missing):
            probe._own_gpu(needs)
        assert chosen == []
    else:
        assert chosen == [probe._own_gpu(needs)] == [torch.device("cuda", 2 % count)]


def test_a_gpu_that_another_rank_has_is_missing(monkeypatch):
    def refuse(device):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nsecond line")

    monkeypatch.setattr(probe, "_cuda_works", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(HardwareMissingError, match=r"devices are busy\.$"):
        probe._own_gpu("cuda")


@pytest.fixture
def referee(tmp_path):
    lab = EXTRA[0][0]
    made = Referee(tmp_path / "s", N, lambda c: draw_for(b"k", lab.name, c.name, "one", N))
    yield made
    made.stop()


def _told(referee, criterion, *statuses_):
    referee.open(criterion)
    for rank, status in enumerate(statuses_):
        sock, _ = dial(referee, rank)
        ask(sock, criterion.name)
        answer(sock, {}, {}, criterion.name, status)
    return referee.close(Status.NOT_RUN)


def test_ranks_without_the_hardware_are_blocked(referee):
    verdict = _told(referee, EXTRA[0][1], "blocked", "blocked")
    assert (verdict.status, verdict.points, verdict.extra) == (Status.BLOCKED, 0, True)
    assert verdict.record()["extra"] is True


def test_one_blocked_rank_gives_no_points(referee):
    verdict = _told(referee, EXTRA[0][1], "error", "blocked")  # the other one waited in vain
    assert (verdict.status, verdict.points) == (Status.BLOCKED, 0)


def test_nothing_else_can_be_blocked(referee):
    verdict = _told(referee, get_lab("lab1_ddp")["setup"], "blocked", "blocked")
    assert (verdict.status, verdict.extra) == (Status.STUDENT_ERROR, False)


@pytest.mark.parametrize(
    ("status", "points", "score"),
    [
        (Status.PASS, 3.0, 103.0),
        (Status.WRONG, 0.0, 100.0),
        (Status.BLOCKED, 0.0, 100.0),
    ],
)
def test_extra_points_come_on_top(status, points, score):
    counted = Verdict("amp_choice", Status.PASS, 100.0, 100.0, "why")
    extra = Verdict("amp_gpu_speed", status, points, 3.0, "why", extra=True)
    record = replace(made_record("x", lab="lab4_amp"), criteria=(counted, extra))
    assert (record.score, record.max_score) == (score, 100.0)
    assert reason(record) == ""  # nothing is missing from full marks
    assert rich_table([record]).row_count == 1
    shown = verdict_output(extra, "twice as fast", True)
    assert shown.output_type == ("error" if status == "WRONG" else "display_data")
    assert " extra" in json.dumps(shown)


@pytest.mark.parametrize(("score", "said"), [(3.0, {}), (0.0, {"amp_gpu_speed": "1.40 times"})])
def test_gradescope_shows_extra_points_as_what_they_are(score, said):
    cell = Cell(name="amp_gpu_speed", score=score, max_score=0.0, needs_person=False)
    person, points = Person(line=0, id="x"), 100 + score
    grade = Grade(person=person, submitted=True, score=points, max_score=100.0, cells=(cell,))
    column = Column(lab="lab4_amp", name="Lab 4", max_score=100.0)
    [test] = gradescope_result(grade, column, {}, said, "0" * 64)["tests"]
    assert (test["score"], test["max_score"]) == (score, 0)
    assert test["status"] == ("failed" if said else "passed")


@pytest.mark.slow
def test_a_class_without_a_gpu_through_nbgrader(tmp_path):
    course = TestCourse.make(tmp_path / "course", "lab4_amp")
    [starter] = load_zoo("lab4_amp", "starter")
    course.submit("s", nbformat.writes(starter.notebook).encode())
    record = course.grade(str(course.root / "handed_in"))["s"]
    blocked = {c["name"] for c in record["criteria"] if c["status"] == "BLOCKED"}
    assert blocked == {"amp_gpu_speed", "amp_gpu_memory"}
    assert set(statuses(record).values()) == {"STUDENT_ERROR", "BLOCKED"}
    assert (record["score"], record["max_score"], record["num_gpus"]) == (0, 100, 0)
    url = f"sqlite:///{course.root / 'build' / 'nbgrader' / 'gradebook.db'}"

    def grade(name):
        with Gradebook(url) as book:
            found = book.find_grade(name, "lab4_amp", "lab4_amp", "s")
            return (
                found.auto_score,
                found.max_score,
                found.needs_manual_grade,
                found.assignment.score,
            )

    assert grade("amp_choice") == (0, 4, False, 0)
    assert grade("amp_gpu_speed") == (None, 0, True, 0)  # left to a person; full marks without it
    # The same on a machine that could tell.
    names = {"student": "s", "assignment": "lab4_amp", "notebook": "lab4_amp", "db_url": url}
    notebook = nbformat.v4.new_notebook()
    extra = Verdict("amp_gpu_speed", Status.PASS, 3.0, 3.0, "why", extra=True)
    record = replace(made_record("s", lab="lab4_amp"), criteria=(extra,))
    resources = {"nbgrader": names, "minidist_record": record}
    assert SavePoints().preprocess(notebook, resources)[0] is notebook
    assert grade("amp_gpu_speed") == (3, 0, False, 3)


# --- what is observed, on the CPU ----------------------------------------------------------------


@contextlib.contextmanager
def _small(full_bytes: int = 1000, mixed_bytes: int = 600):
    """Small sizes; a meter for bytes that knows no GPU tells these, in turn."""
    peaks = [full_bytes, mixed_bytes]

    def peak_bytes(run, device, base=None):
        run()
        return peaks.pop(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_meter, "peak_bytes", peak_bytes)
        patch.setattr(gpu_meter, "free_bytes", lambda device: 1 << 26)
        patch.setattr(gpu_meter, "half_dtype", lambda device: torch.bfloat16)
        patch.setattr(gpu_meter, "warm_up", lambda device: None)
        patch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
        for module in (gpu, fsdp_gpu, prof_gpu):
            patch.setattr(module, "WIDTH", 32)
        patch.setattr(gpu, "FEWEST_SAMPLES", 16)
        patch.setattr(gpu, "BYTES_PER_SAMPLE", 1 << 18)
        patch.setattr(prof_gpu, "MOST_SAMPLES", 512)
        yield


# What each criterion is handed, by lab: a name of the lab's solution, and a wrong submission.
SUBJECTS = {
    "lab4_amp": ("train_amp", "wrong_large_batches_in_fp32"),
    "lab3_fsdp": ("FSDP", "wrong_keeps_large_units"),
    "lab6_profiling": ("GradientBuckets", "wrong_looks_at_large_buckets"),
}


def _subject(lab, *, wrong=False):
    """The solution's function or class; or what a submission of the class has in its place."""
    name, entry = SUBJECTS[lab]
    sources = [(ROOT / "solutions" / lab / f"{lab}.py").read_text("utf-8")]
    sources += load_zoo(lab, entry)[0].replaced.values() if wrong else ()
    found = {"__name__": "__main__"}  # to be sent to the ranks by value
    for source in sources:
        tree = ast.parse(source)
        defines = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        tree.body = [node for node in tree.body if isinstance(node, defines)]
        exec(compile(tree, lab, "exec"), found)
    return found[name]


def _observed(name, subject, draws):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    [criterion] = [c for _, c in EXTRA if c.name == name]
    with _small():
        context = Context(rank, dist.get_world_size(), torch.device("cpu"))
        answer = criterion.observe(subject, draws[rank], context)
    dist.destroy_process_group()
    return answer


@pytest.mark.parametrize(("lab", "criterion"), EXTRA, ids=[c.name for _, c in EXTRA])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.slow
def test_what_is_observed_reaches_the_judge(lab, criterion, num_ranks, monkeypatch):
    draws = criterion.draw(draw_for(b"t", lab.name, criterion.name, "one", num_ranks))
    if criterion.name == "prof_gpu_efficiency" and num_ranks == 1:
        with pytest.raises(HardwareMissingError, match="two ranks or more"):
            criterion.observe(None, draws[0], Context(0, 1, torch.device("cpu")))
        return
    answers = run(_observed, num_ranks, criterion.name, _subject(lab.name), draws)
    with _small():
        for answer in answers:  # times of a GPU, made up
            if "full/seconds" in answer:
                assert len(answer["mixed/seconds"]) == gpu.ROUNDS
                answer["full/seconds"] = 3.0 * np.arange(1.0, 1 + gpu.ROUNDS)
                answer["mixed/seconds"] = np.arange(1.0, 1 + gpu.ROUNDS)
            if "alone/seconds" in answer:
                answer["together/seconds"] = answer["alone/seconds"] / 0.95
        assert criterion.findings(Case(num_ranks, draws, answers)) == []


# --- on a GPU ------------------------------------------------------------------------------------


def _measured(name, subject, draws):
    import torch.distributed as dist

    device = probe._own_gpu("cuda")
    # NCCL refuses two ranks on one GPU.
    dist.init_process_group("nccl" if torch.cuda.device_count() >= len(draws) else "gloo")
    rank = dist.get_rank()
    [criterion] = [c for _, c in EXTRA if c.name == name]
    answer = criterion.observe(subject, draws[rank], Context(rank, len(draws), device))
    dist.destroy_process_group()
    return answer


@pytest.mark.gpu
@pytest.mark.parametrize(("lab", "criterion"), EXTRA, ids=[c.name for _, c in EXTRA])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("wrong", [False, True], ids=["solution", "wrong"])
def test_a_gpu_tells_right_from_wrong(lab, criterion, num_ranks, wrong):
    if criterion.needs == "cuda per rank" and torch.cuda.device_count() < num_ranks:
        pytest.skip(NO_GPU)
    draws = criterion.draw(draw_for(b"t", lab.name, criterion.name, "one", num_ranks))
    subject = _subject(lab.name, wrong=wrong)
    answers = run(_measured, num_ranks, criterion.name, subject, draws, deadline_s=150)
    told = [finding.message for finding in criterion.findings(Case(num_ranks, draws, answers))]
    assert bool(told) == wrong, told or answers


# --- judges --------------------------------------------------------------------------------------


def _amp(speedup=4.0, share=0.6, mixed_loss=1.01):
    times = np.linspace(0.1, 0.2, gpu.ROUNDS)
    return {
        "full/seconds": times,
        "mixed/seconds": times / speedup,
        "full/bytes": 1000,
        "mixed/bytes": int(1000 * share),
        "full/loss": 1.0,
        "mixed/loss": mixed_loss,
        "samples": 4096,
        "dtype": "bfloat16",
    }


def test_mixed_precision_is_held_to_its_promise():
    speed, memory = (get_lab("lab4_amp")[f"amp_gpu_{name}"] for name in ("speed", "memory"))

    def findings(criterion, **answer):
        return [
            f.message
            for f in criterion.findings(
                make_case(get_lab("lab4_amp"), criterion, [_amp(), _amp(**answer)])
            )
        ]

    assert findings(speed) == findings(memory) == []
    [slow] = findings(speed, speedup=1.4)
    assert "expected at least 2 times as fast, got 1.40 times" in slow
    [large] = findings(memory, share=0.9)
    assert "expected at most 0.75 of that, got 0.90" in large
    for criterion in (speed, memory):
        assert findings(criterion, mixed_loss=2.0)  # it has to be the same step


def test_a_rank_holds_its_shards_and_a_few_units():
    lab, criterion = get_lab("lab3_fsdp"), get_lab("lab3_fsdp")["fsdp_gpu_memory"]
    whole = fsdp_gpu.PARAMETER_BYTES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_gpu, "WIDTH", 32)
        case = make_case(lab, criterion, [{}, {}, {}])
        model = fsdp_gpu.build(case.inputs[0]["network"], width=32, num_blocks=fsdp_gpu.BLOCKS)
        losses = []
        for values in case.inputs:
            x, y = fsdp_gpu.data(values["data"])
            losses.append(((model(x) - y) ** 2).mean().item())

        def findings(copies):
            answers = [{"loss": loss, "bytes": int(copies * whole)} for loss in losses]
            return criterion.findings(Case(3, case.inputs, answers))

        assert findings(4 / 3 + 0.3) == []  # ZeRO-3 with a handful of units whole
        for wrong in (4.2, 1 + 3 / 3 + 0.1, 4 / 3 + 1):  # DDP, ZeRO-2, units never freed
            assert "expected at most" in findings(wrong)[0].message
        losses[1] *= 1.1
        assert findings(1.0)[0].rank == 1


def test_buckets_are_held_to_nine_tenths():
    lab, criterion = get_lab("lab6_profiling"), get_lab("lab6_profiling")["prof_gpu_efficiency"]
    rng = np.random.default_rng(0)
    own = 1e-3 * rng.normal(size=(N, prof_gpu.WIDTH))

    def findings(efficiency, gradient=None):
        answers = []
        for rank in range(N):
            alone = np.linspace(0.1, 0.12, prof_gpu.ROUNDS) * (1 + 0.02 * rank)
            answers.append(
                {
                    "alone/seconds": alone,
                    "together/seconds": alone / efficiency,
                    "alone/gradient": own[rank],
                    "samples": 512,
                    "together/gradient": own.mean(axis=0) if gradient is None else gradient,
                }
            )
        return criterion.findings(make_case(lab, criterion, answers))

    assert findings(0.93) == []
    assert "got 0.800" in findings(0.8)[0].message
    assert "mean over ranks" in findings(0.93, gradient=own[0])[0].message


@pytest.mark.parametrize(("lab", "criterion"), EXTRA, ids=[c.name for _, c in EXTRA])
@pytest.mark.parametrize(
    "rubbish",
    [
        None,
        "text",
        [None],
        float("nan"),
        -1,
        True,
        np.full((2, 2), np.nan),
        np.zeros(15),
        np.full(15, np.inf),
        np.zeros(5, bool),
        {},
    ],
)
def test_no_rubbish_passes(lab, criterion, rubbish, monkeypatch):
    monkeypatch.setattr(fsdp_gpu, "WIDTH", 32)
    names = ("full", "mixed", "alone", "together")
    keys = {f"{name}/{what}" for name in names for what in ("seconds", "bytes", "loss", "gradient")}
    answers = [dict.fromkeys(keys | {"bytes", "loss", "samples", "dtype"}, rubbish)] * N
    findings = criterion.findings(make_case(lab, criterion, answers))
    assert findings
    assert all(finding.message for finding in findings)
