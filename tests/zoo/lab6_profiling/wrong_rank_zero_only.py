"""Looks at rank 0 alone: its waiting for another rank looks like a slow network.

loses: prof_finds_loader, prof_finds_copies, prof_finds_logging,
    prof_finds_straggler, prof_finds_buckets
misses: finding-causes
class: example
because: every cause may sit on a rank that it does not look at
says: prof_finds_loader one rank alone loses it, and the rank with most counts
says: prof_finds_copies one rank alone loses it, and the rank with most counts
says: prof_finds_logging alone logs, in steps[
says: prof_finds_straggler one rank computes longer than all others
says: prof_finds_buckets all ranks but one only wait for that one
"""


# %% replaces="task3_bottleneck"
def find_bottleneck(spans, steps):
    own = [s for s in spans if s.rank == 0]
    rows = [breakdown(own, start, end) for start, end in steps[1:]]
    sums = {part: sum(row[part] for row in rows) for part in rows[0]}
    names = {"loader": "loader", "copies": "copy", "logging": "host", "buckets": "communication"}
    losses = {cause: sums[part] for cause, part in names.items()}
    worst = max(losses, key=losses.get)
    return worst if losses[worst] > 0.1 * sum(end - start for start, end in steps[1:]) else "none"
