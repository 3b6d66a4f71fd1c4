"""Fit the constants of `minidist.cost` to the calibration rows: `python -m minidist.plan.calibrate`

A pattern search over one set per GPU generation and per software. It minimises the mean absolute
logarithm of predicted / published seconds, of all tables together (`loss`). Test rows are never
read. It prints the constants, in a minute or two, and writes no file: a person copies them. With
names, such as `nemo A100.half_rows`, it fits these constants only.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence

from minidist.cost.hardware import B200, GPU, GPUS, H100
from minidist.cost.software import SOFTWARE
from minidist.plan.runs import Run, load_runs, predict_run, published_seconds

# What is fitted: (owner, field): smallest and largest value that make sense.
_GPU_RANGES = {
    "matmul_efficiency": (0.3, 1.0),
    "half_rows": (0.0, 2000.0),
    "half_head": (0.0, 200.0),
    "attention_efficiency": (0.1, 1.5),
    "memory_efficiency": (0.3, 0.92),
}
_SOFTWARE_RANGES = {
    "launch_s": (0.05e-3, 3e-3),
    "jitter": (0.0, 0.3),
    "tensor_exposed": (0.0, 1.0),
    "expert_s": (0.0, 1e-3),
    "traffic": (0.2, 4.0),
    "overlap": (0.0, 1.0),
    "attention": (0.5, 3.0),
    "gather_ports": (0.1, 8.0),
    "gather_half_nodes": (2.0, 1e4),
    "bucket_bytes": (1e5, 1e12),
    "shard_bucket_bytes": (1e5, 1e12),
    "step_s": (0.0, 0.3),
    "straggler": (0.0, 0.05),
}
# Software -> constants about which its rows say nothing.
_NO_EXPERTS = {"tensor_exposed", "expert_s"}
_FIXED = {
    "megatron-2021": {
        *_NO_EXPERTS,
        "overlap",
        "bucket_bytes",
        "shard_bucket_bytes",
        "gather_ports",
        "gather_half_nodes",
        "attention",
    },
    "deepspeed-2021": {
        *_NO_EXPERTS,
        "jitter",
        "gather_half_nodes",
        "launch_s",
        "traffic",
        "bucket_bytes",
        "shard_bucket_bytes",
        "step_s",
        "straggler",
        "attention",
    },
    "fsdp": {
        *_NO_EXPERTS,
        "jitter",
        "gather_ports",
        "bucket_bytes",
        "shard_bucket_bytes",
        "attention",
    },
    "nanotron": {*_NO_EXPERTS, "jitter", "gather_ports", "gather_half_nodes"},
    "nemo": {
        "launch_s",
        "jitter",
        "gather_ports",
        "gather_half_nodes",
        "bucket_bytes",
        "shard_bucket_bytes",
        "step_s",
        "straggler",
    },
}
_GENERATIONS = {
    "A100": ("A100 SXM 80 GB", "A100 SXM 40 GB"),
    "H100": ("H100 SXM 80 GB",),
}
_MOST = 0.5  # a run that is off by more, such as a measured outlier, counts no more than this

Values = dict[tuple[str, str], float]


def start_values() -> tuple[Values, dict[tuple[str, str], tuple[float, float]]]:
    """The constants as they are, and their ranges."""
    values: Values = {}
    ranges = {}
    for generation, names in _GENERATIONS.items():
        for field, limits in _GPU_RANGES.items():
            values[generation, field] = getattr(GPUS[names[0]], field)
            ranges[generation, field] = limits
    for name, fixed in _FIXED.items():
        for field, limits in _SOFTWARE_RANGES.items():
            if field not in fixed:
                values[name, field] = getattr(SOFTWARE[name], field)
                ranges[name, field] = limits
    return values, ranges


def _like_h100(gpu: GPU, h100: GPU) -> GPU:
    """The constants of a later GPU follow those of the H100, as in `minidist.cost.hardware`."""
    names = ("half_rows", "half_head", "attention_efficiency", "memory_efficiency")
    return dataclasses.replace(
        gpu,
        matmul_efficiency=gpu.matmul_efficiency / H100.matmul_efficiency * h100.matmul_efficiency,
        **{name: getattr(h100, name) for name in names},
    )


def _owners(run: Run) -> set[str]:
    """Whose constants a run depends on."""
    generation = run.node.gpu.name.split()[0]
    return {generation, run.software} | ({"H100"} if generation == "B200" else set())


def errors(runs: Iterable[Run], values: Values) -> list[float]:
    """Absolute logarithm of predicted / published seconds of each run."""
    changes: dict[str, dict[str, float]] = defaultdict(dict)
    for (owner, field), value in values.items():
        changes[owner][field] = value
    gpus = {
        name: dataclasses.replace(GPUS[name], **changes[generation])  # type: ignore[arg-type]
        for generation, names in _GENERATIONS.items()
        for name in names
    }
    gpus[B200.name] = _like_h100(B200, gpus[H100.name])
    softwares = {
        name: dataclasses.replace(software, **changes.get(name, {}))  # type: ignore[arg-type]
        for name, software in SOFTWARE.items()
    }
    found = []
    for run in runs:
        node = dataclasses.replace(run.node, gpu=gpus[run.node.gpu.name])
        step = predict_run(dataclasses.replace(run, node=node), software=softwares[run.software])
        found.append(min(_MOST, abs(math.log(step.total_s / published_seconds(run)))))
    return found


def loss(runs: list[Run], found: list[float]) -> float:
    """Mean error of the tables, each with the square root of its rows as weight: a table of many
    rows is not to outvote the others, nor a table of one row to count as much."""
    tables: dict[str, list[float]] = defaultdict(list)
    for run, error in zip(runs, found, strict=True):
        tables[run.table].append(error)
    weights = {table: math.sqrt(len(e)) for table, e in tables.items()}
    means = {table: sum(e) / len(e) for table, e in tables.items()}
    return sum(weights[t] * means[t] for t in tables) / sum(weights.values())


def fit(runs: list[Run], *, names: Sequence[str] = (), rounds: int = 14) -> Values:
    """The constants with the smallest loss that the search finds. With `names` (owner, or
    owner.field) only these constants change."""
    values, ranges = start_values()
    if names:
        ranges = {key: r for key, r in ranges.items() if {key[0], ".".join(key)} & {*names}}
    widths = {key: 0.3 for key in values}
    found = errors(runs, values)
    best = loss(runs, found)
    concerned = {
        owner: [i for i, run in enumerate(runs) if owner in _owners(run)] for owner, _ in values
    }
    for _ in range(rounds):
        for key, (low, high) in ranges.items():
            floor = low or high / 100  # so that a value can grow from 0
            some = concerned[key[0]]
            for factor in (1 + widths[key], 1 / (1 + widths[key])):
                value = min(high, max(low, max(values[key], floor) * factor))
                if values[key] <= floor and factor < 1:
                    value = low
                tried = values | {key: value}
                changed = list(found)
                for i, error in zip(some, errors([runs[i] for i in some], tried), strict=True):
                    changed[i] = error
                if (now := loss(runs, changed)) < best - 1e-6:
                    values, best, found = tried, now, changed
                    break
            else:
                widths[key] *= 0.5
    return values


def main(names: Sequence[str] = ()) -> None:
    runs = [run for run in load_runs() if run.split == "calibration"]
    print(f"loss before: {loss(runs, errors(runs, start_values()[0])):.4f}")
    values = fit(runs, names=names)
    for (owner, field), value in values.items():
        print(f"{owner:16} {field:22} {value:.4g}")
    print(f"loss after: {loss(runs, errors(runs, values)):.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
