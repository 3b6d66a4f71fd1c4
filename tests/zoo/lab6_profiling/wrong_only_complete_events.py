"""Returns the events with a length only, without names of processes and threads.

loses: prof_record
"""


# %% replaces="task1_profile"
def profile_steps(step: Callable[[], object], warmup: int, num_steps: int) -> list[dict]:
    for _ in range(warmup):
        step()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            with record_function("step"):
                step()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            return [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
