"""Mixed precision on one GPU: a training step of a GPT in fp32, TF32, fp16 and bf16.

A step is forward, backward and AdamW, on random tokens; the parameters are fp32 in every precision,
as under autocast. Model FLOPs utilisation (MFU) is the model's FLOPs per second over those of a
large product of matrices, both taken in the same round: what the chip gives here and now, not what
its data sheet promises. The FLOPs are the field's count: scores as a full square, though causal
kernels compute half of it (the row's detail has the other count).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from harness import paired
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from gpu.calibrate import make_matmul
from gpu.device import (
    DTYPES,
    known_gpu,
    matmul_precision,
    peak_bytes,
    require_cuda,
    synchronize,
    use_device,
)
from gpu.recorder import Recorder, free_memory
from gpu.sizes import Sizes
from minidist import cost
from minidist.model import GPT, GPTConfig, lm_loss, num_parameters
from minidist.precision import GradScaler, autocast_step

COMPILE_S = 90.0  # about what it takes to compile the whole model, cold
# Small enough that no step overflows: a step that is skipped would be a shorter one.
INIT_SCALE = 2.0**10


class Checkpointed(nn.Module):
    """A GPT that keeps the inputs of its blocks only, and runs each again in backward."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.gpt.embed(tokens_BT)
        for block in self.gpt.blocks:
            x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
        return self.gpt.head(self.gpt.norm(x_BTD))


class Setup:
    """One model and its optimiser, which all precisions train in turn.

    Args:
        batch: sequences per step.
    """

    def __init__(self, config: GPTConfig, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.batch = device, batch
        with torch.device(device):
            self.model = GPT(config)
            tokens_BT = torch.randint(config.vocab_size, (batch, config.context + 1))
        self.inputs_BT, self.targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.transformer = cost.Transformer.from_config(config)

    def step(
        self,
        dtype: str = "bf16",
        scaler: Any = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Tensor:
        """A training step; returns the loss, a scalar on the device.

        Args:
            dtype: of `device.DTYPES`.
            model: another module around the same parameters. optimizer: another one over them.
        """
        kind, precision = DTYPES[dtype]
        with matmul_precision(precision):
            return autocast_step(
                model or self.model,
                lm_loss,
                self.inputs_BT,
                self.targets_BT,
                optimizer or self.optimizer,
                dtype=None if kind is torch.float32 else kind,
                scaler=scaler,
            )

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.inputs_BT.numel()

    def flops(self, *, causal: bool = False) -> float:
        """Of one step, forward and backward."""
        return self.tokens * self.transformer.flops_per_token(causal=causal)


def measure(recorder: Recorder, sizes: Sizes) -> None:
    """All rows of the part."""
    device = use_device(sizes.device)
    setup = recorder.measure("model", lambda: make(recorder, sizes.gpt, sizes.batch, device))
    if setup is not None:
        for name, fn in (
            ("precisions", functools.partial(precisions, recorder, sizes, setup)),
            ("memory of a step", functools.partial(memory, recorder, setup)),
            ("loss scaling", functools.partial(scalers, recorder, sizes, setup, False)),
            ("loss scaling, fused", functools.partial(scalers, recorder, sizes, setup, True)),
            ("checkpointing", functools.partial(checkpointing, recorder, sizes, setup)),
            ("memory with checkpointing", functools.partial(checkpointed_memory, recorder, setup)),
        ):
            recorder.measure(name, fn)
        del setup, fn  # the memory of one model
    free_memory()
    large = recorder.measure("larger batch", lambda: Setup(sizes.gpt, sizes.mfu_batch, device))
    if large is not None:
        eager = functools.partial(eager_mfu, recorder, sizes, large)
        recorder.measure("MFU, eager", eager)
        compiled = functools.partial(compiled_mfu, recorder, sizes, large)
        recorder.measure("MFU, compiled", compiled, needs_s=COMPILE_S / 2)


def make(recorder: Recorder, config: GPTConfig, batch: int, device: torch.device) -> Setup:
    """The model, and its size."""
    setup = Setup(config, batch, device)
    recorder.figure(
        "parameters of the model",
        num_parameters(setup.model),
        "parameters",
        batch=batch,
        context=config.context,
        width=config.width,
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
    )
    return setup


def precisions(recorder: Recorder, sizes: Sizes, setup: Setup) -> None:
    """The same step in four precisions."""
    scaler = GradScaler(INIT_SCALE)
    steps: dict[str, Callable[[], Any]] = {
        dtype: functools.partial(setup.step, dtype, scaler if dtype == "fp16" else None)
        for dtype in DTYPES
    }
    times = paired(steps, rounds=sizes.rounds, warmup=3, calls=1)
    for dtype in DTYPES:
        recorder.rate(f"training, {dtype}", times[dtype], setup.tokens, "tokens/s")
    for dtype, goal in (("tf32", None), ("fp16", None), ("bf16", 5.0)):
        name = f"speed-up of a step, {dtype} over fp32"
        recorder.ratio(name, times, "fp32", dtype, at_least=goal)
    loss = float(setup.step("bf16"))
    recorder.check("the loss is finite", loss == loss and abs(loss) < 1e4, f"it is {loss}")


def memory(recorder: Recorder, setup: Setup) -> None:
    """Peak of a step in each precision, beside the cost model's sum."""
    peaks: dict[str, int] = {}
    for dtype in DTYPES:
        scaler = GradScaler(INIT_SCALE) if dtype == "fp16" else None
        setup.step(dtype, scaler)  # what is allocated once is there
        peaks[dtype] = peak_bytes(functools.partial(setup.step, dtype, scaler), setup.device)
        recorder.figure(f"peak memory of a step, {dtype}", peaks[dtype], "bytes")
    recorder.figure("peak memory, bf16 / fp32", peaks["bf16"] / peaks["fp32"], "ratio")
    # fp32 parameters and gradients, two fp32 states.
    predicted = cost.memory_per_gpu(
        model=setup.transformer,
        parallelism=cost.ParallelismConfig(),
        micro_batch=setup.batch,
        states=cost.state_bytes(precision="fp32"),
        fused_attention=True,
        autocast=True,
        framework_bytes=0,
    ).total
    recorder.figure(
        "peak memory of a step, bf16, measured / cost model",
        peaks["bf16"] / predicted,
        "ratio",
        predicted_bytes=predicted,
    )


def scalers(recorder: Recorder, sizes: Sizes, setup: Setup, fused: bool) -> None:
    """fp16 with our GradScaler, beside torch's, with the same AdamW.

    Args:
        fused: with AdamW in one kernel, to which torch's scaler leaves the division, too.
    """
    which = "fused AdamW" if fused else "AdamW"
    # Not fused=False: with it, torch would update parameter by parameter.
    options: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    optimizer = torch.optim.AdamW(setup.model.parameters(), lr=1e-4, **options)
    both: dict[str, Any] = {
        "ours": GradScaler(INIT_SCALE),
        "torch": torch.amp.GradScaler(setup.device.type, init_scale=INIT_SCALE),
    }
    times = paired(
        {
            name: functools.partial(setup.step, "fp16", scaler, None, optimizer)
            for name, scaler in both.items()
        },
        rounds=2 * sizes.rounds,
        warmup=3,
        calls=1,
    )
    scales = {name: float(scaler.get_scale()) for name, scaler in both.items()}
    recorder.ratio(
        f"step in fp16, our GradScaler / torch's, {which}",
        times,
        "ours",
        "torch",
        at_most=1.02,
        scales=scales,
    )
    recorder.check(
        f"both scalers have the same scale, {which}", len(set(scales.values())) == 1, f"{scales}"
    )


def checkpointing(recorder: Recorder, sizes: Sizes, setup: Setup) -> None:
    """Time of computing every block's activations twice."""
    models: dict[str, nn.Module] = {"plain": setup.model, "again": Checkpointed(setup.model)}
    steps: dict[str, Callable[[], Any]] = {
        name: functools.partial(setup.step, "bf16", None, model) for name, model in models.items()
    }
    with torch.no_grad():
        losses = [
            float(lm_loss(model(setup.inputs_BT), setup.targets_BT)) for model in models.values()
        ]
    recorder.check(
        "checkpointing changes no loss",
        abs(losses[0] - losses[1]) < 1e-4 * abs(losses[0]),
        f"{losses}",
    )
    times = paired(steps, rounds=sizes.rounds, warmup=2, calls=1)
    model = setup.transformer
    more_flops = model.flops_per_token(recompute="full") / model.flops_per_token()
    recorder.ratio(
        "step with activation checkpointing / without",
        times,
        "again",
        "plain",
        ratio_of_flops=more_flops,
    )


def checkpointed_memory(recorder: Recorder, setup: Setup) -> None:
    """What it saves: peak of a step, and of that what is not there before and after it."""
    require_cuda(setup.device)
    models: dict[str, nn.Module] = {"plain": setup.model, "again": Checkpointed(setup.model)}
    steps: dict[str, Callable[[], Any]] = {
        name: functools.partial(setup.step, "bf16", None, model) for name, model in models.items()
    }
    setup.optimizer.zero_grad()
    resident = torch.cuda.memory_allocated(setup.device)
    peaks = {name: peak_bytes(step, setup.device) for name, step in steps.items()}
    for name, what in (("plain", "without"), ("again", "with")):
        recorder.figure(f"peak memory {what} activation checkpointing", peaks[name], "bytes")
    recorder.figure(
        "peak memory beyond parameters and optimiser, with checkpointing / without",
        (peaks["again"] - resident) / (peaks["plain"] - resident),
        "ratio",
    )


def eager_mfu(recorder: Recorder, sizes: Sizes, setup: Setup) -> None:
    """MFU of the step as it is written, with attention by FlashAttention."""
    with flash_only(setup.device):
        utilisation(recorder, sizes, setup, "MFU, eager", functools.partial(setup.step, "bf16"))


def compiled_mfu(recorder: Recorder, sizes: Sizes, setup: Setup) -> None:
    """MFU with model and loss compiled as one; compiling comes before the clock starts."""
    from torch._dynamo.utils import counters  # takes seconds to import

    counters.clear()

    def loss_of(inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return lm_loss(setup.model(inputs_BT), targets_BT)

    compiled = torch.compile(loss_of, backend=sizes.compile_backend)

    def step() -> None:
        setup.optimizer.zero_grad()
        with torch.autocast(setup.device.type, dtype=torch.bfloat16):
            loss = compiled(setup.inputs_BT, setup.targets_BT)
        loss.backward()
        setup.optimizer.step()

    start_s = time.perf_counter()
    for _ in range(3):
        step()
    synchronize(setup.device)
    # It is a figure of this machine's processors, and once per run: no ratio of it is taken.
    recorder.figure("compiling, and the first three steps", time.perf_counter() - start_s, "s")
    breaks, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
    recorder.check(
        "the model compiles into one graph",
        not breaks and graphs == 1,
        f"{breaks} graph breaks, {graphs} graphs: {list(counters['graph_break'])[:2]}",
    )
    times = paired(
        {"compiled": step, "eager": functools.partial(setup.step, "bf16")},
        rounds=sizes.rounds,
        calls=1,
    )
    recorder.ratio("speed-up of a step, compiled over eager", times, "eager", "compiled")
    utilisation(recorder, sizes, setup, "MFU, compiled", step)


def utilisation(
    recorder: Recorder, sizes: Sizes, setup: Setup, name: str, step: Callable[[], Any]
) -> None:
    """FLOP/s of a step over those of a large product in the same round, and of the data sheet."""
    n = sizes.ceiling_n
    product = make_matmul(setup.device, n, "bf16")
    times = paired({"step": step, "product": product}, rounds=sizes.rounds, warmup=2)
    # (F / t_step) / (2 n^3 / t_product)
    of_ceiling = setup.flops() / (2.0 * n**3)
    causal = setup.flops(causal=True) / setup.flops()
    mfu = recorder.ratio(
        name,
        times,
        "product",
        "step",
        factor=of_ceiling,
        unit="share",
        at_least=0.4,
        ceiling=f"a {n} x {n} product in bf16",
        batch=setup.batch,
    )
    recorder.figure(f"{name}, causal FLOPs only", mfu * causal, "share")
    rate = recorder.rate(f"{name}: model FLOPs", times["step"], setup.flops(), "FLOP/s")
    recorder.rate(f"{name}: tokens", times["step"], setup.tokens, "tokens/s")
    gpu = known_gpu(setup.device)
    if gpu is not None:
        share = rate / gpu.peak("bf16")
        recorder.figure(f"{name}, of the data sheet's peak", share, "share", gpu=gpu.name)


@contextmanager
def flash_only(device: torch.device) -> Iterator[None]:
    """Attention by FlashAttention or not at all: no fallback that would be timed instead."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]) if device.type == "cuda" else nullcontext():
        yield
