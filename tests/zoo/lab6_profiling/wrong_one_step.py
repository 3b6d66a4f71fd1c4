"""Marks all profiled steps together as one.

loses: prof_record
"""


# %% replaces="task1_profile"
def profile_steps(step, warmup, num_steps):
    for _ in range(warmup):
        step()
    with profile() as recorded, record_function("step"):
        for _ in range(num_steps):
            step()
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(folder + "/trace.json")
        return json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
