"""The models and the data of the course: they learn, and are the same everywhere."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from minidist.data import make_images, make_regression, make_tokens
from minidist.model import GPT, GPTConfig, ResNet, lm_loss, num_parameters


def test_parameters_of_a_gpt_are_those_of_the_formula():
    config = GPTConfig(vocab_size=50, context=8, width=16, num_layers=3, num_heads=2)
    layer = 12 * 16**2 + 13 * 16  # weights, then biases and norms
    embeddings = (50 + 8) * 16
    assert num_parameters(GPT(config)) == 3 * layer + embeddings + 2 * 16 + 50 * 16
    tied = GPTConfig(vocab_size=50, context=8, width=16, num_layers=3, num_heads=2, tied=True)
    assert num_parameters(GPT(tied)) == num_parameters(GPT(config)) - 50 * 16


def test_attention_is_causal():
    torch.manual_seed(0)
    model = GPT(GPTConfig()).double()
    tokens, _ = make_tokens(2, 32, 64)
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 64
    same = (model(tokens) - model(changed)).abs().amax((0, 2))
    assert same[:20].max() < 1e-12
    assert same[20:].min() > 1e-6


def test_a_gpt_learns_the_chain():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=16, context=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = None
    for step in range(60):
        inputs, targets = make_tokens(128, 16, 16, seed=step)
        loss = lm_loss(model(inputs), targets)
        first = first or loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert first == pytest.approx(math.log(16), abs=0.1)
    assert 1.2 < loss.item() < 1.6  # the chain's entropy is 1.21 nats


def test_a_resnet_learns_the_patterns_and_holds_on_new_images():
    torch.manual_seed(0)
    model = ResNet(num_classes=4, width=8)
    images, labels = make_images(128, num_classes=4, size=8, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    new_images, new_labels = make_images(128, num_classes=4, size=8, seed=2)
    assert (model(new_images).argmax(1) == new_labels).float().mean() > 0.9


def test_data_depends_on_its_arguments_alone():
    for make, arguments in (
        (make_tokens, (5, 7, 11)),
        (make_images, (5, 3, 4)),
        (make_regression, (5, 3, 2)),
    ):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        first, again, other = make(*arguments), make(*arguments), make(*arguments, seed=1)
        assert torch.equal(before, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0], other[0])
    assert make_tokens(0, 4, 8)[0].shape == (0, 4)


def test_wrong_use_says_what_is_right():
    with pytest.raises(ValueError, match="width 10 cannot be split into 3 equal heads"):
        GPTConfig(width=10, num_heads=3)
    with pytest.raises(ValueError, match="sequences of 9 tokens, but its context is 8"):
        GPT(GPTConfig(context=8))(torch.zeros(1, 9, dtype=torch.int64))
