"""Published training runs as data, and the prediction of each.

The files in `published/` say which rows may be used to fit and which only to test.

>>> len(load_runs("vtrain_clusters")), load_runs("vtrain_clusters")[0].split
(88, 'calibration')
"""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from minidist.cost.hardware import GB, GPUS, H100, NODES, Node, network
from minidist.cost.memory import StateBytes, memory_per_gpu, state_bytes
from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.software import SOFTWARE, Software
from minidist.cost.step import StepTime, predict_step
from minidist.cost.transformer import Transformer
from minidist.plan.models import MODELS

FOLDER = Path(__file__).parent / "published"
# torchtitan's H100s have a lower power limit, and an older memory with 96 GB.
_H100_500W = dataclasses.replace(
    H100.at_power(500),
    name="H100 96 GB 500 W",
    memory_bytes=96 * GB,
    memory_bandwidth_bytes_per_s=2.4e12,
)
_INSIDE = {
    node.gpu.name.split()[0]: node.intra_node for node in NODES.values() if node.num_gpus == 8
}
_GPUS = GPUS | {_H100_500W.name: _H100_500W}
# All rows with a printed memory are runs of nanotron, which sums gradients in fp32 beside those in
# bf16.
_NANOTRON_STATES = StateBytes(parameter=2, gradient=6, optimizer=12)
FILES = tuple(sorted(path.stem for path in FOLDER.glob("*.csv")))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published step.

    Attributes:
        micro_batch, chunks: None where none is printed: then the best that fits is predicted.
        unit: of `published`: step_s, tokens_per_s_gpu, mfu_pct, tflops_model, tflops_recompute.
    """

    table: str
    split: str
    software: str
    model: Transformer
    node: Node
    parallelism: ParallelismConfig
    batch: int
    micro_batch: int | None
    chunks: int | None
    schedule: str
    recompute: str
    fused_attention: bool
    dtype: str
    unit: str
    published: float
    memory_gb: float | None


def load_runs(*files: str) -> list[Run]:
    """The rows of some of the files of `published/`; of all files if none is named."""
    return [_run(row) for file in files or FILES for row in _rows(FOLDER / f"{file}.csv")]


def _rows(path: Path) -> list[dict[str, str]]:
    lines = path.read_text("utf-8").splitlines()
    same: dict[str, str] = {}
    for line in lines:
        if line.startswith("# every row: "):
            pairs = line.removeprefix("# every row: ").split("; ")
            same = dict(pair.split("=", 1) for pair in pairs)
    table = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [same | row for row in table]


def _model(row: dict[str, str]) -> Transformer:
    """By name, or from sizes."""
    if "model" in row:
        return dataclasses.replace(MODELS[row["model"]], context=int(row["context"]))
    whole = {
        key: int(row[key])
        for key in ("layers", "width", "heads", "kv_heads", "mlp_width", "vocab", "context")
    }
    gated = row["gated"] == "1"
    return Transformer(
        vocab_size=whole["vocab"],
        context=whole["context"],
        width=whole["width"],
        num_layers=whole["layers"],
        num_heads=whole["heads"],
        num_kv_heads=whole["kv_heads"],
        mlp_ratio=whole["mlp_width"] / whole["width"],
        gated_mlp=gated,
        tied=row["tied"] == "1",
        bias=not gated,
        norm_bias=not gated,
        learned_positions=not gated,
    )


def _run(row: dict[str, str]) -> Run:
    gpu = _GPUS[row["gpu"]]
    node = Node(
        name=f"8 x {gpu.name}, {row['network_gbit']} Gbit/s each",
        gpu=gpu,
        num_gpus=8,
        intra_node=_INSIDE[gpu.name.split()[0]],
        network=network(gigabits_per_s=float(row["network_gbit"]), name="InfiniBand"),
    )
    parallelism = ParallelismConfig(
        dp=int(row["dp"]),
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        cp=int(row.get("cp", 1)),
        ep=int(row.get("ep", 1)),
        zero_stage=int(row["zero"]),
        sequence_parallel=row["sequence_parallel"] == "1",
    )
    return Run(
        table=row["table"],
        split=row["split"],
        software=row["stack"],
        model=_model(row),
        node=node,
        parallelism=parallelism,
        batch=int(row["batch"]),
        micro_batch=int(row["micro_batch"]) if row["micro_batch"] else None,
        chunks=int(row["chunks"]) if row["chunks"] else None,
        schedule=row["schedule"],
        recompute=row["recompute"],
        fused_attention=row["fused"] == "1",
        dtype=row["precision"],
        unit=row["unit"],
        published=float(row["published"]),
        memory_gb=float(row["memory_gb"]) if row["memory_gb"] else None,
    )


def predict_run(run: Run, *, software: Software | None = None) -> StepTime:
    """The prediction of a run; where micro-batch or chunks are not printed, the fastest of a few
    that divide and fit."""
    micro_batches = (run.micro_batch,) if run.micro_batch else (1, 2, 4, 8)
    best: StepTime | None = None
    for micro_batch in micro_batches:
        for chunks in _chunks(run, micro_batch):
            plan = dataclasses.replace(run.parallelism, virtual_stages=chunks)
            if run.micro_batch is None and not _fits(run, plan, micro_batch):
                continue
            step = predict_step(
                model=run.model,
                parallelism=plan,
                node=run.node,
                global_batch=run.batch,
                micro_batch=micro_batch,
                recompute=run.recompute,
                fused_attention=run.fused_attention,
                dropout=not run.fused_attention,
                dtype=run.dtype,
                software=software or SOFTWARE[run.software],
                schedule=run.schedule,
                even_stages=False,
            )
            if best is None or step.total_s < best.total_s:
                best = step
    if best is None:
        raise ValueError(f"{run.table}: nothing divides and fits for {run.parallelism}")
    return best


def _chunks(run: Run, micro_batch: int) -> list[int]:
    p = run.parallelism
    if run.chunks is not None:
        return [run.chunks]
    if p.pp == 1:
        return [1]
    if run.batch % (p.dp * micro_batch * p.pp):
        return [1]
    return [v for v in (1, 2, 3, 4) if run.model.num_layers % (p.pp * v) == 0]


def _fits(run: Run, plan: ParallelismConfig, micro_batch: int) -> bool:
    memory = memory_per_gpu(
        model=run.model,
        parallelism=plan,
        micro_batch=micro_batch,
        states=state_bytes(precision="bf16_fp32_grads"),
        recompute=run.recompute,
        dropout=True,
    )
    return memory.total <= run.node.gpu.memory_bytes and not run.batch % (plan.dp * micro_batch)


def published_seconds(run: Run) -> float:
    """Seconds of the published step, from the unit in which it was printed."""
    gpus, model, tokens = run.parallelism.world_size, run.model, run.batch * run.model.context
    if run.unit == "step_s":
        return run.published
    if run.unit == "tokens_per_s_gpu":
        return tokens / run.published / gpus
    flops = tokens * model.flops_per_token(
        recompute="full" if run.unit == "tflops_recompute" else "none"
    )
    peak = run.node.gpu.peak("bf16")
    rate = run.published * (peak / 100 if run.unit == "mfu_pct" else 1e12)
    return flops / rate / gpus


def error_of(run: Run) -> float:
    """Predicted / published seconds - 1."""
    return predict_run(run).total_s / published_seconds(run) - 1


def memory_error_of(run: Run) -> float | None:
    """Predicted / published bytes of the fullest GPU - 1; None where none are printed."""
    if run.memory_gb is None or run.micro_batch is None:
        return None
    plan = run.parallelism
    memory = memory_per_gpu(
        model=run.model,
        parallelism=plan,
        micro_batch=run.micro_batch,
        num_microbatches=run.batch // (plan.dp * run.micro_batch),
        states=_NANOTRON_STATES,
        recompute=run.recompute,
        fused_attention=run.fused_attention,
    )
    return memory.total / GB / run.memory_gb - 1
