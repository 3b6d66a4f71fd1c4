"""Where ranks meet: in the store of torch's agent, whatever a cell says.

Code from a tutorial sets MASTER_ADDR and MASTER_PORT, or passes a tcp:// address. Under torch's
agent no rank would serve a store at that address, and every rank would wait for minutes.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

_AGENT_SERVES = "TORCHELASTIC_USE_AGENT_STORE"
_PLACE = ("MASTER_ADDR", "MASTER_PORT")
_cell = "start"
_inits_in_cell = 0


def new_cell(cell_id: str) -> None:
    """Every rank that runs the cell calls this with the same `cell_id`."""
    global _cell, _inits_in_cell
    _cell, _inits_in_cell = cell_id, 0


def install() -> None:
    """Makes every `init_process_group` of this process use the agent's store, with a new prefix.

    The store outlives process groups. Without the prefix, a second `init_process_group` would read
    addresses that the first one left there, and fail to connect. The prefix consists of the cell
    and the number of the call within the cell, so ranks agree on it without communication, even
    after one of them failed half way in an earlier cell.

    Processes that the rank starts use the address in their environment: their rank 0 serves it.
    """
    import torch.distributed as dist

    # `torch.distributed.rendezvous` as an attribute is the function of that name.
    handlers: dict[str, Any] = importlib.import_module(
        "torch.distributed.rendezvous"
    )._rendezvous_handlers
    originals = {scheme: handlers[scheme] for scheme in ("env", "tcp")}
    place = {name: os.environ[name] for name in _PLACE}
    os.environ.pop(_AGENT_SERVES, None)
    kernel = os.getpid()

    def meet(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        global _inits_in_cell
        parts = urlsplit(url)
        if os.getpid() != kernel:  # a copy that the student's code has forked
            yield from originals[parts.scheme](url, *args, **kwargs)
            return
        _inits_in_cell += 1
        prefix = f"minidist/{_cell}/{_inits_in_cell}"
        for told in _overwritten(parts.scheme, parts.netloc, place):
            print(told, file=sys.stderr)
        os.environ.update(place)
        with mock.patch.dict(os.environ, {_AGENT_SERVES: "True"}):
            found = originals["env"](f"env://?{parts.query}", *args, **kwargs)
            for store, rank, world_size in found:
                yield dist.PrefixStore(prefix, store), rank, world_size

    handlers |= dict.fromkeys(originals, meet)


def _overwritten(scheme: str, netloc: str, place: dict[str, str]) -> Iterator[str]:
    """A text for each address that the student's code sets: the setting, its line, what to do."""
    found = [(f"{name}={os.environ.get(name)}", name) for name in _PLACE]
    changed = [pair for pair in found if os.environ.get(pair[1]) != place[pair[1]]]
    if scheme == "tcp":
        changed.append((f"init_method='tcp://{netloc}'", "tcp://"))
    for what, text in changed:
        yield (
            f"{what} is ignored{_line_with(text)}. Delete it: this kernel has started the ranks, "
            f"and they meet at {place['MASTER_ADDR']}:{place['MASTER_PORT']}."
        )


def _line_with(text: str) -> str:
    """The first line with `text` in the newest cell that contains `text`; else an empty string."""
    from IPython import get_ipython

    shell: Any = get_ipython()
    cells = shell.history_manager.input_hist_raw if shell else []
    for number in range(len(cells) - 1, 0, -1):
        for line, source in enumerate(cells[number].splitlines(), 1):
            if text in source and not source.lstrip().startswith("#"):
                return f" (In[{number}], line {line}: {source.strip()})"
    return ""
