"""The pretended GPUs that a rank finds: their generators behave like real ones."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch

from autograder.criteria.common.virtual_gpu import GpuGenerator, VirtualGpus

SECOND_OF_THREE = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}


def collect() -> torch.Tensor:
    return torch.cuda.get_rng_state()


def test_a_state_goes_back_and_the_numbers_go_on():
    generator = GpuGenerator().manual_seed(-3)
    first, state = generator.draw(4), generator.get_state()
    second = generator.draw(4)
    assert first != second
    other = GpuGenerator()
    other.set_state(state)
    assert other.draw(4) == second
    assert other.initial_seed() == torch.Generator().manual_seed(-3).initial_seed()


def test_ranks_have_a_gpu_each_and_only_inside():
    with patch.dict(os.environ, SECOND_OF_THREE):
        gpus = VirtualGpus()
    gpus.generator.manual_seed(5)
    available = torch.cuda.is_available()
    with gpus.found_by(collect):
        assert torch.cuda.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (3, 1)
        assert torch.equal(collect(), gpus.generator.get_state())
        assert not torch.equal(torch.cuda.get_rng_state(0), collect())
        torch.cuda.set_rng_state_all([torch.Generator("cuda").get_state()] * 3)
        assert gpus.generator.initial_seed() == 0
        torch.manual_seed(7)
    assert gpus.generator.initial_seed() == 7
    assert torch.cuda.is_available() == available
    assert gpus.refused == ""


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        (lambda: torch.cuda.set_rng_state(torch.get_rng_state()), "wrong size"),
        (lambda: torch.cuda.set_rng_state([1, 2]), "torch.ByteTensor"),
        (lambda: torch.cuda.get_rng_state(3), "cuda:3 was asked for, and the node has 3"),
    ],
)
def test_what_a_real_gpu_would_refuse(call, refused: str):
    with patch.dict(os.environ, SECOND_OF_THREE):
        gpus = VirtualGpus()
    with gpus.found_by(collect):
        call()
    assert refused in gpus.refused


@pytest.mark.gpu
def test_a_real_generator_has_such_a_state():
    real = torch.Generator("cuda").manual_seed(11)
    assert real.get_state().shape == GpuGenerator().get_state().shape
    with pytest.raises(RuntimeError, match="wrong size"):
        real.set_state(torch.get_rng_state())
