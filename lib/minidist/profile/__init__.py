"""Measure where time, memory and bandwidth go. The tools do not change what they measure.

    timeline      each rank's work over time: one format, Chrome/Perfetto export
    trace         timelines from torch.profiler, on gloo and on GPUs
    overlap       compute, exposed and overlapped communication, bubble, of a step
    memory        parameters, gradients, optimiser state, activations over a step
    loader        time that the loop waits for data      loader_settings  settings that are enough
    stragglers    late ranks, and their cost             monitor, readers  GPU use, memory, power
    scaling       strong and weak scaling                paired           DDP and plain training
    interconnect  latency and bandwidth between ranks    topology         links between devices
    nccl          environment variables explained        flight           missing ranks in a hang

Example: a DDP step on gloo, and where its time went::

    with torch.profiler.profile() as profile:
        for _ in range(3):
            with torch.profiler.record_function("step"):
                train_step()
    timeline = gather_timeline(from_profiler(profile, step="step"))   # on all ranks
    print(report(timeline))
    save_chrome_trace(timeline, "trace.json")                         # open in ui.perfetto.dev

Names that need torch are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
