"""What the device can do at best: matrix products, copies, launches.

Rates are of calls that are queued one after the other, with the clock read before the first and
after the device has done the last; small ones are bound by their launches. Matrices are random: a
product of zeros needs less power, and runs faster than any real one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import paired

from gpu.device import DTYPES, known_gpu, matmul_precision, require_cuda, synchronize, use_device
from gpu.recorder import Recorder
from gpu.sizes import Sizes
from minidist import cost
from minidist.profile.paired import quartiles

_GRAPH_LAUNCHES = 100  # of a captured graph


def measure(recorder: Recorder, sizes: Sizes) -> None:
    """All rows of the part."""
    device = use_device(sizes.device)
    for n in sizes.matmul:
        recorder.measure(f"products of {n}", functools.partial(matmuls, recorder, sizes, device, n))
    recorder.measure("clock", lambda: clock(recorder, sizes, device))
    recorder.measure("copies on the device", lambda: device_copy(recorder, sizes, device))
    recorder.measure("copies from and to the host", lambda: host_copies(recorder, sizes, device))
    recorder.measure("launches", lambda: launches(recorder, sizes, device))


def make_matmul(device: torch.device, n: int, dtype: str) -> Callable[[], Any]:
    """A product of two random n x n matrices, into memory that is there; 2 n^3 FLOPs.

    Args:
        dtype: of `device.DTYPES`.
    """
    kind, precision = DTYPES[dtype]
    a, b = (torch.randn(n, n, device=device, dtype=torch.float32).to(kind) for _ in "ab")
    out = torch.empty_like(a)

    def product() -> None:
        with matmul_precision(precision):
            torch.mm(a, b, out=out)

    return product


def matmuls(recorder: Recorder, sizes: Sizes, device: torch.device, n: int) -> None:
    """Rate of n x n products in every dtype, beside what the data sheet says."""
    products = {dtype: make_matmul(device, n, dtype) for dtype in DTYPES}
    times = paired(products, rounds=sizes.rounds)
    gpu = known_gpu(device)
    for dtype in DTYPES:
        sheet = None if gpu is None else gpu.peak_flops_per_s.get(dtype)
        name = f"product of {n} x {n}, {dtype}"
        rate = recorder.rate(name, times[dtype], 2.0 * n**3, "FLOP/s", data_sheet=sheet)
        if sheet is not None and gpu is not None and n == max(sizes.matmul):
            recorder.figure(
                f"{name}, share of the data sheet",
                rate / sheet,
                "share",
                cost_model_matmul_efficiency=gpu.matmul_efficiency,
                gpu=gpu.name,
            )
    for dtype in ("tf32", "fp16", "bf16"):
        recorder.ratio(f"speed-up of products of {n}, {dtype} over fp32", times, "fp32", dtype)


def clock(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """The host's clock around a sample, beside the device's own events: all rows rest on it."""
    require_cuda(device)
    product = make_matmul(device, sizes.ceiling_n, "bf16")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    product()
    ratios = []
    for _ in range(sizes.rounds):
        synchronize(device)
        start_s = time.perf_counter()
        begin.record()
        for _ in range(5):
            product()
        end.record()
        synchronize(device)
        wall_s = time.perf_counter() - start_s
        ratios.append(wall_s / (begin.elapsed_time(end) / 1e3))
    low, middle, high = quartiles(ratios)
    recorder.figure("host's clock / CUDA events", middle, "ratio", low=low, high=high, at_most=1.05)


def device_copy(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """Bandwidth of the device's memory: bytes read and bytes written, per second."""
    source = torch.randint(0, 256, (sizes.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = paired({"copy": lambda: target.copy_(source)}, rounds=sizes.rounds)
    gpu = known_gpu(device)
    sheet = None if gpu is None else gpu.memory_bandwidth_bytes_per_s
    moved = 2.0 * sizes.copy_bytes
    name = "copy on the device, read and written"
    rate = recorder.rate(name, times["copy"], moved, "bytes/s", data_sheet=sheet)
    if gpu is not None and sheet is not None:
        share_of = f"{name}, share of the data sheet"
        recorder.figure(share_of, rate / sheet, "share", gpu=gpu.name)


def host_copies(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """Bandwidth between host and device, from pinned and from pageable memory."""
    require_cuda(device)
    num_bytes = sizes.host_copy_bytes
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    pageable = torch.zeros(num_bytes, dtype=torch.uint8)
    times = paired(
        {
            "host to device, pinned": lambda: on_device.copy_(pinned, non_blocking=True),
            "host to device, pageable": lambda: on_device.copy_(pageable),
            "device to host, pinned": lambda: pinned.copy_(on_device, non_blocking=True),
            "device to host, pageable": lambda: pageable.copy_(on_device),
        },
        rounds=sizes.rounds,
        calls=1,
    )
    slot = cost.pcie(generation=5)
    for name, seconds in times.items():
        recorder.rate(
            f"copy, {name}",
            seconds,
            num_bytes,
            "bytes/s",
            pcie_5_x16=slot.bandwidth_bytes_per_s,
            pcie_5_x16_attainable=slot.attainable_fraction,
        )
    for way in ("host to device", "device to host"):
        name = f"speed-up of pinned memory, {way}"
        recorder.ratio(name, times, f"{way}, pageable", f"{way}, pinned")


def launches(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """What a kernel costs that has nothing to do: launched by itself, and out of a CUDA graph."""
    require_cuda(device)
    x = torch.zeros(1, device=device)
    turns = max(1, sizes.launches // _GRAPH_LAUNCHES)

    def add() -> None:
        for _ in range(_GRAPH_LAUNCHES):
            x.add_(1)

    # Capture wants a stream of its own, on which the same work has run before.
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        add()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add()
    times = paired({"launched": add, "graph": graph.replay}, rounds=sizes.rounds, calls=turns)
    for name, seconds in times.items():
        low, middle, high = quartiles([each / _GRAPH_LAUNCHES for each in seconds])
        recorder.figure(f"a kernel of one number, {name}", middle, "s", low=low, high=high)
    recorder.ratio("what launching costs over a CUDA graph", times, "launched", "graph")
