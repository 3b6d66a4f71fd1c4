"""A barrier that says which ranks are missing, on any backend; torch's needs gloo.

Ranks meet in the store of the default group, and send no message of their own: a rank that is
stuck in a different collective is missing here, and does not disturb it.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from minidist.errors import DeadlineError

_rounds: Counter[str] = Counter()


def monitored_barrier(group: dist.ProcessGroup | None = None, timeout_s: float = 60.0) -> None:
    """Wait until all ranks of the group are here. Does not wait for work on GPUs.

    Args:
        timeout_s: for all ranks together, from this rank's call.

    Raises:
        DeadlineError: on every rank that is here; the message names the ranks that are not.
    """
    store = distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    name = "_".join(map(str, ranks))
    number = _rounds[name]
    _rounds[name] += 1
    rank = dist.get_rank()

    def key(who: object, round: int = number) -> str:
        return f"minidist/barrier/{name}/{round}/{who}"

    # All ranks were at the last barrier, so no rank waits for keys of the barrier before that.
    store.delete_key(key(rank, number - 2))
    store.set(key(rank), "")
    end_s = time.monotonic() + timeout_s
    missing = list(ranks)
    while missing and not store.check([key("failed")]):
        left_s = end_s - time.monotonic()
        try:
            store.wait([key(missing[0])], timedelta(seconds=max(0.01, min(left_s, 1.0))))
        except RuntimeError:  # it did not come in time
            if left_s <= 0:
                store.set(key("failed"), "")
        missing = [each for each in missing if not store.check([key(each)])]
    if store.check([key("failed")]):
        absent = [each for each in ranks if not store.check([key(each)])]
        who = f"missing: rank {', '.join(map(str, absent))}" if absent else "a rank came too late"
        raise DeadlineError(
            f"monitored_barrier: not all of the ranks {ranks} came within {timeout_s:g} s; {who}",
            rank=rank,
        )
