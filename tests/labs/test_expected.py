"""What a lab says to expect of a demo, below or above it, is what its reference solution shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from course import ROOT
from demos import LABS, is_demo, name_of, run_without_errors, solution_up_to, text_of

approx = pytest.approx
Check = Callable[[str], object]
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w|\.\d)")


def numbers(text: str, after: str = "") -> list[float]:
    """The numbers that stand after a label, to the end of its line; of the whole text without."""
    if after:
        assert after in text, f"nothing is called {after!r}"
        text = text[text.index(after) + len(after) :].splitlines()[0]
    return [float(number) for number in NUMBER.findall(text.replace(",", " "))]


def has(*parts: str) -> Check:
    """Whether the demo shows each of these."""
    return lambda text: all(part in " ".join(text.split()) for part in parts)


# --- what each demo must show, by lab and demo ------------------------------------------------


def columns_are_orthonormal(text: str) -> bool:
    independent, parallel, zero = (
        [abs(x) for x in numbers(text, after)] for after in ("independent:", "parallel:", "zero:")
    )
    first = [parallel[0], parallel[2]] == approx([0.6, 0.8])
    return independent == approx([0.6, 0.8, 0.8, 0.6]) and first and zero == [0.0] * 4


def power_steps_find_the_best(text: str) -> bool:
    rows = [numbers(text, f"rank {rank}:") for rank in (1, 2, 4, 8)]
    return all(after == approx(best, abs=5e-3) and before > after for before, after, best in rows)


def fewer_bytes_stop_to_help(text: str) -> bool:
    ratios = [numbers(text, f"rank {rank:2d}:")[0] for rank in (1, 32)]
    saved = re.findall(r"saved: 1 Gbit/s (\d+) ms.*NVLink (-?\d+) ms", text)
    slow, nvlink = ([float(row[k]) for row in saved] for k in (0, 1))
    return (
        [round(ratio) for ratio in ratios] == [318, 18]
        and len(saved) == 4
        and slow == approx([5000.0] * 4, rel=0.05)
        and max(nvlink) < 0
    )


def feedback_finds_the_loss(text: str) -> bool:
    loss, sent = {}, {}
    for label in ("uncompressed", "feedback    ", "no feedback "):
        for rank, value, count in re.findall(rf"rank (\d), {label}: loss ([\d.]+), +(\d+)", text):
            loss[int(rank), label.strip()], sent[int(rank)] = float(value), int(count)
    whole, lame = loss[0, "uncompressed"], [loss[rank, "no feedback"] for rank in (1, 2, 4)]
    near = [loss[rank, "feedback"] for rank in (1, 2, 4)] == approx([whole] * 3, rel=0.25)
    third = sent[1] / sent[4] == approx(1 / 3, rel=0.05)
    return near and third and lame[0] > 10 * whole and lame[2] > loss[1, "feedback"]


def rounding_but_for_the_input(text: str) -> bool:
    with_f, without = (
        [float(x) for x in re.findall(r"\de-\d+", line)] for line in text.splitlines()
    )
    return max(*with_f, *without[:2]) < 1e-6 and without[2] > 0.5


def streams(text: str) -> bool:
    outside, inside = (re.findall(r"[.x]{8,}", line) for line in text.splitlines())
    return len(outside) == len(inside) == 2 and len(set(outside)) == 1 and len(set(inside)) == 2


def pipeline_falls(text: str) -> bool:
    losses = [float(x) for x in re.findall(r"'([\d.]+)'", text)]
    return len(losses) == 4 and losses == sorted(losses, reverse=True) and losses[3] < losses[0] / 2


def pipeline_is_cheap_for_few(text: str) -> bool:
    rows = re.findall(r"(\d+) sequences: pipeline +([\d.]+) GB, gradients ([\d.]+) GB", text)
    share = {int(n): float(pipe) / float(ring) for n, pipe, ring in rows}
    same = len({ring for *_, ring in rows}) == 1
    return (
        same and share[8] == approx(0.01, rel=0.3) and 4096 / share[4096] == approx(730, rel=0.01)
    )


def table_below(text: str) -> bool:
    """The table that stands below `see_against`."""
    source = (ROOT / "solutions" / "bonus_pipeline" / "bonus_pipeline.py").read_text("utf-8")
    below = source[source.index('# %% demo="see_against"') :]
    expected = below.split("# Expected:\n#\n# ```\n")[1].split("# ```")[0].replace("\n# ", "\n")
    words = [re.findall(r"[A-Za-z]\S*", table) for table in (text, expected)]
    values = [numbers(table) for table in (text, expected)]
    return words[0] == words[1] and len(values[0]) > 30 and values[0] == approx(values[1], rel=0.05)


def but_for_step_counters(text: str) -> bool:
    found = 0
    for line in text.splitlines():
        formula, measured = (
            [int(n) for n in group.split(", ")] for group in re.findall(r"\(([\d, ]+)\)", line)
        )
        counters = measured[2] - formula[2]
        found += formula[:2] == measured[:2] and 0 < counters < 300 and counters % 4 == 0
    return found == 2


def same_losses_half_the_bytes(text: str) -> bool:
    pairs = re.findall(r"one process ([\d.]+), sharded ([\d.]+)", text)
    whole, here = numbers(text, "parameters:")
    same = all(float(one) == approx(float(other), rel=1e-4) for one, other in pairs)
    return same and len(pairs) == 5 and here == whole / 2


def bf16_is_close(text: str) -> bool:
    plain, mixed, offload = (float(loss) for loss in re.findall(r"loss ([\d.]+)", text))
    return 0 < abs(mixed - plain) < 1e-3 and offload == plain and text.count("torch.float32") == 3


def several_times_less(text: str) -> bool:
    kept, again = numbers(text, "kept "), numbers(text, "computed again ")
    return again[0] < kept[0] / 3 and again[1] == approx(kept[1], abs=1e-4)


def zero3_takes_longest(text: str) -> bool:
    ms = {stage: numbers(text, f"{stage}: ")[1] for stage in ("ddp", "zero2", "zero3")}
    return ms["zero3"] > ms["zero2"] > ms["ddp"] > 9


def formats(text: str) -> bool:
    row = {name: numbers(text, name) for name in ("float32 ", "float16 ", "bfloat16 ")}
    fp32, fp16, bf16 = row.values()
    return (
        fp16 == approx([65504, 6.1e-5, 6e-8, 2**-10], rel=0.01)
        and bf16[0] == approx(fp32[0], rel=0.01)
        and bf16[3] == approx(0.0078, rel=0.01)
        and numbers(text, "1.0e-04 in fp16 is") == [1e-4]
        and numbers(text, "2.0e-08 in fp16 is") == [0.0]
    )


def scale_is_found(text: str) -> bool:
    scale, skipped, _ = numbers(text, "scale at the end")
    return scale in (512, 1024) and skipped >= 3


def only_fp16_needs_a_scale(text: str) -> bool:
    ends = dict(re.findall(r"^(\S.*?) +loss × 10⁷ from [\d.]+ to (\S+),", text, re.MULTILINE))
    fp32 = float(ends["fp32"])
    return (
        float(ends["fp16, not scaled"]) > 5 * fp32
        and ends["fp16, scaled, every step"] == "nan"
        and float(ends["fp16, your scaler"]) == approx(fp32, rel=0.05)
        and float(ends["bf16, not scaled"]) == approx(fp32, rel=0.05)
    )


def memory_of_precisions(text: str) -> bool:
    rows = re.findall(r"batch (\d+) +(\S.*?) +KiB: (.*)", text)
    kib = {(int(batch), name): numbers(values) for batch, name, values in rows}
    for batch in (16, 2048):
        fp32, mixed, bf16 = (kib[batch, n] for n in ("fp32", "autocast bf16", "all in bf16"))
        if mixed[:3] != fp32[:3] or bf16[:3] != approx([x / 2 for x in fp32[:3]], rel=0.01):
            return False
        if not (mixed[3] < 0.6 * fp32[3] if batch == 2048 else mixed[3] > fp32[3]):
            return False
    return len(kib) == 6


def half_the_bytes_less_than_half_the_time(text: str) -> bool:
    ms = {name: numbers(text, f"{name}: ")[0] for name in ("no hook", "torch.float16")}
    return ms["no hook"] / 2 < ms["torch.float16"] < ms["no hook"]


def events(text: str) -> bool:
    return numbers(text, "'cpu_op': ")[0] >= 200 and "gloo:all_reduce" in text


def waits_at_least(text: str) -> bool:
    """What sleeps takes at least that long; how much longer is a matter of the machine."""
    steps = [
        [float(x) for x in row.split("ms")[3:5]] for row in re.findall(r"^ +\d.*ms", text, re.M)
    ]
    return len(steps) == 3 and all(loader >= 4 and host >= 1 for loader, host in steps)


def loader_waits(text: str) -> bool:
    return min(numbers(text, "one after the other: waits") + numbers(text, "works")) >= 6


def best_buckets(text: str) -> bool:
    return re.findall(r"best with +(\d+) buckets", text) == ["6", "8", "24"]


def efficiency_of_plans(text: str) -> bool:
    rows = [numbers(text, f"{name}:") for name in ("one for all", "one for each", "tuned")]
    efficiency = [row[3] for row in rows]
    same = all(predicted == approx(emulated, rel=1e-3) for _, predicted, emulated, _ in rows)
    return same and efficiency == approx([0.79, 0.79, 0.935], abs=0.005)


def mended_alone_is_right(text: str) -> bool:
    gaps = {
        name: numbers(text, f"{name}: largest difference of a weight")[0]
        for name in ("SGD, broken", "SGD, mended", "Adam, broken", "Adam, mended")
    }
    return gaps.pop("Adam, broken") > 1e-3 and max(gaps.values()) < 1e-6


def ddp_wins(text: str) -> bool:
    ms = {name: float(found) for name, found in re.findall(r"^(\S+).* ([\d.]+) ms$", text, re.M)}
    return ms["PyTorch's"] < ms["yours"]


EXPECTED: dict[str, dict[str, Check]] = {
    "bonus_debug_ddp": {
        "compare_1": has(
            "broken: 128 samples seen, 64 different ones",
            "mended: 64 samples seen, 64 different ones",
            "saved ['weight', 'bias']",
        ),
        "compare_2": mended_alone_is_right,
    },
    "bonus_elastic": {
        "see_share": has(
            "[[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]", "[[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]"
        ),
        "see_combine": has("[1.0, 2.0] 5.0"),
        "see_sampler": has("was taken: {1}"),
        "see_saving": lambda text: (
            text.count(".pt'") == 3 and text.count("all load (20, {'value': 20})") == 2
        ),
        "see_reshard": has(
            *(
                f"{{'step': 9, 'exp_avg': tensor([{part}])}}"
                for part in ("1., 2., 3.", "4., 5., 6.", "7., 0., 0.")
            )
        ),
        "see_preemption": lambda text: text.strip() == "[False, False, False, True, True]",
        "see_rehearsal": lambda text: (
            has(
                "restart: step-00000060",
                "SIGTERM: step-00000080",
                "120 losses",
                "curves are the same: True",
            )(text)
            and numbers(text, "largest relative difference")[0] < 1e-12
        ),
    },
    "bonus_pipeline": {
        "see_cut": has("they cost [61, 60]", "they cost [21, 30, 30, 40]"),
        "see_schedules": has(
            "ends at 33, ranks keep [8, 8, 8, 8]", "at 33, ranks keep [4, 3, 2, 1]"
        ),
        "see_bubble": lambda text: (
            [numbers(text, f"{stages} stages:")[-1] for stages in (2, 4)] == [9, 27]
            and [int(x) for x in re.findall(r"1, 4, 16, 64: +(\d+)%", text)] == [50, 75, 88, 94]
        ),
        "see_pipeline": lambda text: (
            numbers(text, "loss")[0] == approx(1.1, abs=0.05) and text.count("'1.0000'") == 3
        ),
        "see_timeline": has(
            "GPipe 34.20 ms, idle 29.8%; without messages 27.3%", "1F1B 36.20 ms, idle 33.7%"
        ),
        "see_training": pipeline_falls,
        "see_bytes": pipeline_is_cheap_for_few,
        "see_against": table_below,
    },
    "bonus_powersgd": {
        "see_columns": columns_are_orthonormal,
        "see_packed_mean": has("[[[0.5, 0.5], [0.5, 0.5]], 5.0]"),
        "see_power_step": power_steps_find_the_best,
        "see_matrix_shape": lambda text: (
            has(": (512, 512)", ": (64, 288)")(text) and text.count(": None") == 3
        ),
        "see_class": lambda text: (
            has("rank 4,", "Q is (30, 4), the bias has None")(text)
            and numbers(text, "off by")[0] == approx(66.7, abs=5)
        ),
        "see_feedback": lambda text: (
            numbers(text, "steps:")[0] < 1 and numbers(text, "steps:")[1] < 1e-6
        ),
        "see_planning": fewer_bytes_stop_to_help,
        "see_training": feedback_finds_the_loss,
    },
    "bonus_ring_all_reduce": {
        "see_chunks": has(
            "[(0, 3), (3, 6), (6, 9), (9, 12)]",
            "[(0, 2), (2, 5), (5, 7), (7, 10)]",
            "[(0, 0), (0, 1), (1, 1), (1, 2)]",
        ),
        "see_exchange": has("[[2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]"),
        "see_hook": has("weight: 1.0"),
    },
    "bonus_tensor_parallel": {
        "see_f_and_g": has(
            "[([1.0, 1.0], [30.0, 30.0]), ([2.0, 2.0], [30.0, 30.0])]",
            "[([3.0, 3.0], [10.0, 10.0]), ([3.0, 3.0], [20.0, 20.0])]",
        ),
        "see_linear": has("(4, 6) and (6, 4)", "1e-5: True"),
        "see_mlp": rounding_but_for_the_input,
        "see_attention": has(
            "rank 0 has the rows [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]",
            "rank 1 has the rows [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]",
        ),
        "see_stream": streams,
        "see_training": lambda text: (
            has("in one piece the same: True", "holds 51 % of")(text)
            and numbers(text, "loss") == approx([1.38, 0.2], abs=0.05)
        ),
        "see_vocabulary": lambda text: len(set(numbers(text))) == 1 and len(numbers(text)) == 2,
        "see_price": has("22 MB; gradients: 25 MB", "352 MB; gradients: 6342 MB, 18 times"),
        "see_traffic": has(
            "tensor 2 forward, 2 backward, 393 kB",
            "sequence 4 forward, 4 backward, 393 kB",
            "the course's 2 forward, 2 backward, 393 kB",
            "each on its own 2 forward, 4 backward, 590 kB",
            "together 2 forward, 2 backward, 393 kB",
        ),
    },
    "bonus_zero": {
        "see_flat": has(
            "[1.0, 2.0, 3.0, 4.0, 5.0, 0.0]", "[tensor([[10., 11.], [12., 13.]]), tensor(14.)]"
        ),
        "see_groups": has("[(2, 3)] [(4,)]"),
        "see_clip": has("norm 13.00, rank 0's share [0.3, 0.4]"),
        "see_zero1": has("[1.5, 1.5, 1.5]", "[-1.5, -1.5, -1.5, -1.5, -1.5]"),
        "see_zero2": has("[None, None, None, None]", "[(10,), (5,)]"),
        "see_save": has("'step': tensor(1.), 'exp_avg': tensor([0.0000, 0.1000, 0.2000, 0.3000])"),
        "see_planning": has(
            "= 112.00 GB, sent 49.0 GB, with 8 micro-batches 49.0 GB",
            "= 66.50 GB, sent 73.5 GB, with 8 micro-batches 73.5 GB",
            "= 42.00 GB, sent 49.0 GB, with 8 micro-batches 220.5 GB",
            "= 14.00 GB, sent 73.5 GB, with 8 micro-batches 588.0 GB",
        ),
        "see_comparison": lambda text: (
            all(
                f"stage {stage}: measured {size} bytes" in " ".join(text.split())
                and f"formula {size};" in text
                for stage, size in enumerate((465920, 407680, 349440, 232960))
            )
            and numbers(text, "at most")[0] < 1e-6
        ),
    },
    "lab2_accumulation": {
        "see_timeline": lambda text: (
            numbers(text, "naive: efficiency")[0] == approx(0.5, abs=0.05)
            and numbers(text, "yours: efficiency")[0] > 0.9
        ),
    },
    "lab3_fsdp": {
        "see_formula": has("ddp: 112.0 GB", "zero3: 14.0 GB"),
        "see_measure": but_for_step_counters,
        "see_fsdp": same_losses_half_the_bytes,
        "see_timeline": lambda text: numbers(text, "two steps:")[0] < 1.1 * 18,
        "see_policies": bf16_is_close,
        "see_recompute": several_times_less,
        "see_checkpoint": lambda text: numbers(text, "on:") == numbers(text, "resumed:"),
        "see_strategies": zero3_takes_longest,
    },
    "lab4_amp": {
        "see_formats": formats,
        "see_scaler": scale_is_found,
        "see_training": only_fp16_needs_a_scale,
        "see_memory": memory_of_precisions,
        "see_bytes": half_the_bytes_less_than_half_the_time,
    },
    "lab5_multinode": {
        "see_hierarchy": has(
            "flat: 6.1 ms, node 0 sent 6.0 MB", "yours: 4.2 ms, node 0 sent 4.0 MB"
        ),
        "see_beside": ddp_wins,
    },
    "lab6_profiling": {
        "see_events": events,
        "see_breakdown": waits_at_least,
        "see_prefetch": loader_waits,
        "see_u_shape": best_buckets,
        "see_efficiency": efficiency_of_plans,
        "see_scaling": lambda text: (
            re.findall(r"\((\d+)%\)", text) == ["100", "94", "78", "100", "79", "69"]
        ),
    },
}
# Numbers of these texts that say what is given, or follow from what is shown.
NOT_SHOWN = {
    "bonus_elastic": {"see_sampler": {24}, "see_saving": {30}, "see_reshard": {99}},
    "bonus_pipeline": {"see_bytes": {730}},
    "lab3_fsdp": {"see_formula": {80}},
    "lab4_amp": {"see_scaler": {1024}, "see_memory": {12, 16}, "see_bytes": {16}},
    "lab6_profiling": {"see_prefetch": {12}},
}
# What these are expected to show is the time that this machine takes.
TIMED = {"lab6_profiling": {"see_report", "see_overhead"}}


def says_what_is_expected(lab: str) -> dict[str, str]:
    """Each demo with a text that begins with "Expected" below it, or says "Expect ..." above it."""
    notebook = nbformat.read(ROOT / "solutions" / lab / f"{lab}.ipynb", as_version=4)
    cells = notebook.cells
    found = {}
    for position, cell in enumerate(cells):
        word = re.search(r"\bExpect(ed)?\b", cell.source)
        if cell.cell_type == "markdown" and word:
            below = cell.source.startswith("Expected")
            near = reversed(cells[:position]) if below else cells[position:]
            demo = next(filter(is_demo, near))
            found[name_of(demo)] = cell.source[word.start() :]
    return found


@pytest.mark.parametrize("lab", LABS)
def test_every_expectation_is_looked_at(lab: str) -> None:
    looked_at = set(EXPECTED.get(lab, ())) | TIMED.get(lab, set())
    assert set(says_what_is_expected(lab)) == looked_at, "EXPECTED above has a check for each"


def not_shown(says: str, text: str) -> set[float]:
    """The numbers of two digits or more, and those with decimals, that a demo does not show."""
    shown = numbers(text)
    said = re.findall(NUMBER, re.sub(r"(?<=\d),(?=\d{3})", "", says.split("\n\n")[0]))
    large = {float(number) for number in said if "." in number or abs(float(number)) >= 10}
    return {n for n in large if not any(shown_n == approx(n, rel=0.06) for shown_n in shown)}


# What a demo prints itself: "... 3e-08  (fine: below 1e-6)", "... True  (expected True)".
FINE = re.compile(r"(\S+)  \(fine: below (\S+)\)")
AS_EXPECTED = re.compile(r"^(?!broken).*?(\S+) +\(expected ([^ )]+)( for both| each)?\)", re.M)
NOT_FOUND = "handed out when this lab is over"  # said by `minidist.beside.beside`


@pytest.mark.parametrize(
    "lab",
    [pytest.param(lab, marks=[pytest.mark.nightly] * (lab != "bonus_debug_ddp")) for lab in LABS],
)
def test_the_reference_shows_what_is_expected(lab: str, tmp_path: Path) -> None:
    says = says_what_is_expected(lab)
    solution = nbformat.read(ROOT / "solutions" / lab / f"{lab}.ipynb", as_version=4)
    demos = [name_of(cell) for cell in solution.cells if is_demo(cell)]
    demos = [name for name in demos if name not in TIMED.get(lab, ())]
    notebook = solution_up_to(lab, demos)
    run_without_errors(notebook, tmp_path)
    wrong, looked_at = [], 0
    for cell in notebook.cells:
        name, text = name_of(cell), text_of(cell)
        check = EXPECTED.get(lab, {}).get(name)
        looked_at += check is not None
        if check is not None:
            if not check(text):
                wrong.append(f"{name} shows\n{text}\nbut the lab says\n{says[name]}")
            if lost := not_shown(says[name], text) - NOT_SHOWN.get(lab, {}).get(name, set()):
                wrong.append(f"{name} does not show {lost}, of which the lab says\n{says[name]}")
        if NOT_FOUND in text:
            wrong.append(f"{name} does not find a part of the library:\n{text}")
        for value, bound in FINE.findall(text):
            looked_at += 1
            if not float(value) < float(bound):
                wrong.append(f"{name}: {value} is not below {bound}")
        for value, expected, _ in AS_EXPECTED.findall(text):
            looked_at += 1
            if value.strip("[],:") != expected:
                wrong.append(f"{name}: {value} instead of {expected}")
    assert not wrong, "\n\n".join(wrong)
    assert looked_at >= 2
