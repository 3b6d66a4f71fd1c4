"""Profiles with torch's own schedule; finds what is covered by sweeping over starts and ends;
keeps only the outermost operators; adds up every step's losses.

loses: nothing
"""


# %% replaces="task1_profile"
def profile_steps(step, warmup, num_steps):
    wait, warm = max(0, warmup - 1), min(1, warmup)
    plan = torch.profiler.schedule(wait=wait, warmup=warm, active=num_steps, repeat=1)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "t.json")
        with profile(schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(file)) as prof:
            for _ in range(warmup + num_steps):
                with torch.autograd.profiler.record_function("step"):
                    step()
                prof.step()
        with open(file) as opened:
            return json.load(opened)["traceEvents"]


# %% replaces="task1_spans"
def to_spans(events, rank):
    events = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"]))
    on_gpu = any(e["cat"] == "kernel" for e in events)
    spans, reached, loading = [], {}, {}
    for e in events:
        kind, name, cat, tid = None, e["name"], e["cat"], e["tid"]
        end = e["ts"] + e["dur"]
        if name.startswith("enumerate(DataLoader)"):
            kind = "loader"
            loading[tid] = end
        elif cat == "kernel":
            kind = "communication" if name[:4] == "nccl" else "compute"
        elif cat in {"gpu_memcpy", "gpu_memset"}:
            kind = "copy"
        elif cat == "user_annotation":
            kind = {"gloo:": "communication", "host:": "host"}.get(name[:5])
        elif cat == "cpu_op" and not on_gpu and not name.startswith("c10d::"):
            # Of operators inside others the outer one, and none inside the loader.
            if end > reached.get(tid, -1) and end > loading.get(tid, -1):
                kind = "compute"
                reached[tid] = end
        if kind:
            spans.append(
                Span(rank=rank, kind=kind, name=name, start=e["ts"] * 1e-6, end=end * 1e-6)
            )
    return spans


# %% replaces="task2_shares"
ORDER = ["compute", "communication", "copy", "loader", "host", "idle"]


def sweep(spans, start, end):
    """(seconds, set of kinds) between one start or end and the next."""
    marks = [(start, 0, ""), (end, 0, "")]
    for s in spans:
        a, b = max(s.start, start), min(s.end, end)
        if a < b:
            marks += [(a, 1, s.kind), (b, -1, s.kind)]
    marks.sort()
    running, before = dict.fromkeys(ORDER, 0), start
    for at, change, kind in marks:
        yield at - before, {k for k, n in running.items() if n}
        if kind:
            running[kind] += change
        before = at


def utilisation(spans, start, end):
    return sum(d for d, kinds in sweep(spans, start, end) if "compute" in kinds) / (end - start)


def overlap(spans, start, end):
    both = all_of_it = 0.0
    for d, kinds in sweep(spans, start, end):
        if "communication" in kinds:
            all_of_it += d
            both += d * ("compute" in kinds)
    return both / all_of_it if all_of_it else 1.0


def breakdown(spans, start, end):
    parts = dict.fromkeys(ORDER, 0.0)
    for d, kinds in sweep(spans, start, end):
        parts[next((k for k in ORDER if k in kinds), "idle")] += d
    return parts


# %% replaces="task3_bottleneck"
def find_bottleneck(spans, steps):
    ranks = sorted({s.rank for s in spans})
    rows = []
    for r in ranks:
        own, row = [s for s in spans if s.rank == r], dict.fromkeys(ORDER, 0.0)
        for step in steps[1:]:
            for k, v in breakdown(own, *step).items():
                row[k] += v
        rows.append(row)
    whole = sum(rows[0].values())
    compute = [row["compute"] for row in rows]
    shares = [
        (max(row["loader"] for row in rows), "loader"),
        (max(row["copy"] for row in rows), "copies"),
        (max(row["host"] for row in rows), "logging"),
        (max(compute) - min(compute), "straggler"),
        (min(row["communication"] for row in rows), "buckets"),
        (whole / 10, "none"),
    ]
    return max(shares)[1]
