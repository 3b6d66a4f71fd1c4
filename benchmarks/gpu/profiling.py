"""What this course's profiling tools read from a GPU: traces, overlap, memory, the monitor.

The CPU tests hold these tools against traces with known spans. Here the traces are a GPU's own:
kernels on streams, copies beside them, collectives behind backward.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import run_bench
from torch.profiler import profile, record_function

from gpu.calibrate import make_matmul
from gpu.device import choose_world, peak_bytes, require_cuda, start_rank, synchronize, use_device
from gpu.recorder import Recorder, free_memory
from gpu.sizes import Sizes
from minidist.model import GPT, lm_loss
from minidist.parallel.data import BucketedDDP, DDPOptions, average_gradients_flat, wrap_ddp
from minidist.profile import MemoryTracker, Monitor, Shares, Timeline, from_profiler, step_shares
from minidist.profile.overlap import total
from minidist.profile.paired import end_rank

DEADLINE_S = 45.0
STEPS = 4  # of a trace; the first is left out of the shares


def measure(recorder: Recorder, sizes: Sizes) -> None:
    """All rows of the part."""
    backend, n = choose_world(sizes.device, at_least=2)
    name = f"overlap, {n} ranks over {backend}"
    recorder.measure(name, lambda: overlap(recorder, sizes, name, backend, n))
    device = use_device(sizes.device)
    recorder.measure("trace of a step", lambda: trace(recorder, sizes, device))
    recorder.measure("copies on a side stream", lambda: side_stream(recorder, sizes, device))
    recorder.measure("memory tracker", lambda: tracker(recorder, sizes, device))
    recorder.measure("monitor", lambda: monitor(recorder, sizes, device))


def record(step: Callable[[], Any], device: torch.device) -> Timeline:
    """The timeline of some steps, by torch.profiler; two more go before it."""
    for _ in range(2):
        step()
    synchronize(device)
    with profile() as profiled:  # all activities that this machine supports
        for _ in range(STEPS):
            with record_function("step"):
                step()
        synchronize(device)
    return from_profiler(profiled, step="step")


def sum_of(timeline: Timeline) -> Shares:
    """Over the steps of this rank, without the first, which has the profiler's own start in it.

    Raises:
        RuntimeError: the trace has no time in its steps.
    """
    every = step_shares(timeline)
    of = total(every[1:] or every)
    if not of.step_s:
        raise RuntimeError(f"{len(every)} steps in the trace, which last no time")
    return of


def make_training_step(sizes: Sizes, device: torch.device) -> tuple[GPT, Any, Callable[[], None]]:
    """A small GPT, its optimiser, and a step in bf16."""
    torch.manual_seed(0)
    config = sizes.trace_gpt
    with torch.device(device):
        model = GPT(config)
        tokens_BT = torch.randint(config.vocab_size, (sizes.trace_batch, config.context + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = lm_loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:])
        loss.backward()
        optimizer.step()

    return model, optimizer, step


def trace(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """A training step: is the GPU what computes, and does its time add up?"""
    _, _, step = make_training_step(sizes, device)
    timeline = record(step, device)
    lanes = sorted({span.lane for span in timeline.spans if span.kind == "compute"})
    wanted = "stream" if device.type == "cuda" else "thread"
    recorder.check(
        "the trace's computation is the device's",
        bool(lanes) and lanes[0].startswith(wanted),
        f"it is on {lanes}: no kernels in the trace (is profiling allowed here?)",
        lanes=lanes,
    )
    all_of_it = sum_of(timeline)
    parts = ("compute", "exposed", "copy", "loader", "idle")
    error = abs(sum(getattr(all_of_it, f"{part}_s") for part in parts) - all_of_it.step_s)
    recorder.check(
        "the shares of a step add up to it",
        error < 1e-6 * all_of_it.step_s,
        f"{error:.3g} s of {all_of_it.step_s:.3g} s are missing",
    )
    report_shares(recorder, "training step in bf16", all_of_it)


def report_shares(recorder: Recorder, name: str, of: Shares) -> None:
    """Shares of the steps' time."""
    for part in ("compute", "exposed", "copy", "idle"):
        share = getattr(of, f"{part}_s") / of.step_s
        what = {"exposed": "exposed communication", "copy": "exposed copies"}.get(part, part)
        recorder.figure(f"{name}: {what}", share, "share")


def side_stream(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """A copy from pinned memory in the way of the products, and the same beside them."""
    require_cuda(device)
    products = [make_matmul(device, sizes.stage_matmul, "bf16") for _ in range(2)]
    pinned = torch.zeros(sizes.stage_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device=device)
    side = torch.cuda.Stream(device)

    def compute() -> None:
        for _ in range(8):
            for product in products:
                product()

    def in_line() -> None:
        target.copy_(pinned, non_blocking=True)
        compute()

    def beside() -> None:
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)  # the last step's products have read what is overwritten
        with torch.cuda.stream(side):
            target.copy_(pinned, non_blocking=True)
        compute()
        current.wait_stream(side)

    exposed = {}
    for name, step in (("in line", in_line), ("on a side stream", beside)):
        of = sum_of(record(step, device))
        exposed[name] = of.copy_s / of.step_s
        recorder.figure(f"exposed copies, {name}", exposed[name], "share")
    recorder.check(
        "a copy beside the products is less exposed than one before them",
        exposed["on a side stream"] < 0.5 * exposed["in line"],
        f"{exposed}",
    )


def overlap(recorder: Recorder, sizes: Sizes, name: str, backend: str, n: int) -> None:
    """How much of its communication each form of data parallelism hides behind computation."""
    every = run_bench(overlap_of_all, n, backend, sizes, deadline_s=DEADLINE_S)
    for form in every[0]:
        of = total([found[form] for found in every])
        recorder.check(
            f"{name}: {form}: the trace has communication",
            of.communication_s > 0,
            "it has none",
        )
        recorder.figure(
            f"{name}: {form}: communication behind computation",
            of.overlap_fraction,
            "share",
            communication_s=of.communication_s,
            step_s=of.step_s,
            compute_s=of.compute_s,
        )
        recorder.figure(f"{name}: {form}: exposed communication", of.exposed_s / of.step_s, "share")


def overlap_of_all(backend: str, sizes: Sizes) -> dict[str, Shares]:
    """On every rank: where the time of its steps goes, in forms that overlap and in one that
    does not."""
    device = start_rank(backend, sizes.device)
    config = sizes.trace_gpt
    torch.manual_seed(1 + dist.get_rank())
    tokens_BT = torch.randint(config.vocab_size, (sizes.trace_batch, config.context + 1)).to(device)

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(config).to(device)

    flat = model()
    forms: dict[str, tuple[Any, Callable[[], None]]] = {
        "one all-reduce after backward": (flat, lambda: average_gradients_flat(flat)),
        "ours": (BucketedDDP(model(), gradient_as_bucket_view=True), lambda: None),
        "torch's DDP": (wrap_ddp(model(), DDPOptions(gradient_as_bucket_view=True)), lambda: None),
    }

    def step(call: Any, after: Callable[[], None]) -> None:
        call.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = lm_loss(call(tokens_BT[:, :-1]), tokens_BT[:, 1:])
        loss.backward()
        after()

    found = {
        name: sum_of(record(functools.partial(step, *form), device)) for name, form in forms.items()
    }
    # A DDP must be gone before its process group.
    forms.clear()
    free_memory()
    end_rank()
    return found


def tracker(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """Peak by our MemoryTracker, which counts storages, beside the allocator's own."""
    model, optimizer, step = make_training_step(sizes, device)
    for _ in range(2):
        step()
    with MemoryTracker(model, optimizer, keep_rows=False) as tracked:
        step()
    counted = tracked.peak.total
    recorder.figure("peak of a step, MemoryTracker", counted, "bytes")
    allocated = peak_bytes(step, device)
    recorder.figure(
        "peak of a step, MemoryTracker / CUDA's allocator",
        counted / allocated,
        "ratio",
        allocated_bytes=allocated,
        activations_bytes=tracked.peak_of("activations"),
    )


def monitor(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """Utilisation, memory and power as the monitor sees them while the device is busy."""
    product = make_matmul(device, sizes.ceiling_n, "bf16")
    with Monitor(interval_s=sizes.monitor_s / 10) as watch:
        end_s = time.perf_counter() + sizes.monitor_s
        while time.perf_counter() < end_s:
            product()
            synchronize(device)
    summary = watch.summary()
    recorder.check("the monitor has readings", bool(summary), f"none: {watch.error!r}")
    if device.type == "cuda":
        read = [each.device for each in summary]
        recorder.check(
            "the monitor reads the GPU",
            all(name.startswith("gpu") for name in read),
            f"it reads {read}: neither nvidia-ml-py nor nvidia-smi is here",
        )
    # NVML counts all GPUs of the machine, whichever this process sees: the busiest is ours.
    busiest = max(summary, key=lambda each: each.peak_utilization or 0.0)
    detail = {"device": busiest.device, "samples": busiest.num_samples}
    if busiest.peak_utilization is not None:
        use = busiest.peak_utilization
        goal = 0.9 if device.type == "cuda" else None
        recorder.figure("utilisation, peak over the samples", use, "share", at_least=goal, **detail)
    if busiest.peak_memory_bytes is not None:
        recorder.figure("memory in use, peak", busiest.peak_memory_bytes, "bytes", **detail)
    if busiest.power_w is not None:
        recorder.figure("power, mean", busiest.power_w, "W", **detail)
