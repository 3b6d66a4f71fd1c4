"""Starts the profiler before the warm-up steps, so that what is unlike all others is in the
trace.

loses: prof_record
class: example
"""


# %% replaces="task1_profile"
def profile_steps(step, warmup, num_steps):
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        for number in range(warmup + num_steps):
            with record_function("step" if number >= warmup else "warm-up"):
                step()
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(folder + "/trace.json")
        return json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
