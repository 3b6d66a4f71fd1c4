"""The trace stays in the folder for temporary files, a new one with every call.

loses: prof_record
"""


# %% replaces="task1_profile"
def profile_steps(step: Callable[[], object], warmup: int, num_steps: int) -> list[dict]:
    """The events of `num_steps` profiled calls of `step`, after `warmup` calls without profiler."""
    ### BEGIN SOLUTION
    for _ in range(warmup):
        step()

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        for _ in range(num_steps):
            with record_function("step"):
                step()

    path = Path(tempfile.mkdtemp()) / "trace.json"
    recorded.export_chrome_trace(str(path))
    return json.loads(path.read_text())["traceEvents"]
    ### END SOLUTION
