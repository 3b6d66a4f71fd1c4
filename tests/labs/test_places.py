"""Where a rank seems to be while it is judged: torch's GPUs fit the environment that it sees."""

from __future__ import annotations

import os
import types

import pytest
import torch

from autograder.criteria.common.places import on_two_nodes
from autograder.criteria.common.pretending import namespace
from autograder.criteria.criterion import Context
from minidist.device import choose_device

NOTEBOOK = """
import torch
from torch.cuda import device_count
DEVICE = torch.device("cuda", 0)
def seen():
    return DEVICE.type, device_count(), torch.cuda.device_count(), torch.cuda.is_available()
"""


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_beside_one_gpu_every_rank_stays_on_the_cpu(world_size, monkeypatch):
    """The last rank is alone on its node and would take the GPU, to which no other rank came."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    notebook = types.ModuleType("notebook")
    exec(NOTEBOOK, vars(notebook))
    as_it_was = notebook.seen()
    assert as_it_was == ("cuda", 1, 1, True)

    for rank in range(world_size):
        context = Context(rank, world_size, torch.device("cpu"))
        for subject in (notebook.seen, (notebook.seen, print)):
            with on_two_nodes(context, subject):
                assert notebook.seen() == ("cpu", 0, 0, False)
                assert choose_device().type == "cpu"
                assert int(os.environ["LOCAL_WORLD_SIZE"]) <= max(1, world_size - 1)
    assert notebook.seen() == as_it_was


def test_names_are_the_notebooks_whatever_wraps_a_function():
    notebook = types.ModuleType("notebook")
    exec("import functools, torch\n@torch.no_grad()\ndef plain(): ...", vars(notebook))
    exec("@functools.wraps(dict)\ndef odd(): ...", vars(notebook))
    for written in (notebook.plain, notebook.odd, (notebook.plain, print)):
        assert namespace(written) is vars(notebook)
