"""How large everything is: `FULL` for a GPU with 80 GB, `TINY` for a rehearsal on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.model import GPTConfig

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of all parts.

    Attributes:
        device: "cuda" or "cpu".
        rounds: samples of each paired comparison.
        matmul: n of n x n products. ceiling_n: the one that utilisation refers to.
        copy_bytes: of a copy on the device. host_copy_bytes: between host and device.
        launches: small kernels that are queued in a row.
        gpt: the model of mixed precision. batch: its sequences per step, in every precision.
        mfu_batch: in 16 bits, for utilisation.
        compile_backend: of torch.compile.
        train: the model of the training loop, whose synthetic data wants a small vocabulary.
        train_batch: sequences per rank and step.
        steps_per_sample: of the training loop.
        memory_gpt: sharded over ranks, for its memory.
        trace_gpt, trace_batch: what is profiled.
        message_bytes: of collectives that are timed.
        world_sizes: of the ranks that share a GPU.
        stage_bytes: copied beside the products of a profiled step; stage_matmul: their n.
        monitor_s: seconds of work that the monitor looks at.
    """

    device: str
    rounds: int
    matmul: tuple[int, ...]
    ceiling_n: int
    copy_bytes: int
    host_copy_bytes: int
    launches: int
    gpt: GPTConfig
    batch: int
    mfu_batch: int
    compile_backend: str
    train: GPTConfig
    train_batch: int
    steps_per_sample: int
    memory_gpt: GPTConfig
    trace_gpt: GPTConfig
    trace_batch: int
    message_bytes: tuple[int, ...]
    world_sizes: tuple[int, ...]
    stage_bytes: int
    stage_matmul: int
    monitor_s: float


def _gpt(num_layers: int, width: int, vocab_size: int, context: int, tied: bool) -> GPTConfig:
    return GPTConfig(
        num_layers=num_layers,
        width=width,
        vocab_size=vocab_size,
        context=context,
        num_heads=max(1, width // 64),
        tied=tied,
    )


FULL = Sizes(
    device="cuda",
    rounds=10,
    matmul=(1024, 2048, 4096, 8192),
    ceiling_n=8192,
    copy_bytes=1024 * MIB,
    host_copy_bytes=256 * MIB,
    launches=1000,
    # GPT-2 medium, with a vocabulary that is a multiple of 64: 355 million parameters.
    gpt=_gpt(24, 1024, 50304, 1024, tied=True),
    batch=8,
    mfu_batch=16,
    compile_backend="inductor",
    train=_gpt(24, 1024, 2048, 1024, tied=False),
    train_batch=8,
    steps_per_sample=2,
    memory_gpt=_gpt(8, 1024, 2048, 1024, tied=False),
    trace_gpt=_gpt(6, 1024, 2048, 512, tied=False),
    trace_batch=8,
    message_bytes=(1 * MIB, 16 * MIB),
    world_sizes=(1, 2, 3, 4),
    stage_bytes=64 * MIB,
    stage_matmul=4096,
    monitor_s=2.0,
)

TINY = Sizes(
    device="cpu",
    rounds=3,
    matmul=(32, 64),
    ceiling_n=64,
    copy_bytes=1 * MIB,
    host_copy_bytes=1 * MIB,
    launches=20,
    gpt=_gpt(2, 64, 96, 16, tied=True),
    batch=2,
    mfu_batch=2,
    compile_backend="aot_eager",  # no C++ compiler, no minutes
    train=_gpt(2, 64, 64, 16, tied=False),
    train_batch=2,
    steps_per_sample=1,
    memory_gpt=_gpt(2, 64, 64, 16, tied=False),
    trace_gpt=_gpt(2, 64, 64, 16, tied=False),
    trace_batch=2,
    message_bytes=(4096,),
    world_sizes=(1, 2),
    stage_bytes=1 * MIB,
    stage_matmul=64,
    monitor_s=0.3,
)
