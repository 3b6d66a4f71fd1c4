"""Recipes for other frameworks: what they say, and where one is installed, what it does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch.distributed as dist

from minidist.launch import run
from minidist.model import GPT, num_parameters
from minidist.peers import (
    build_megatron,
    deepspeed_config,
    megatron_arguments,
    megatron_settings,
    train_deepspeed,
)
from minidist.train import TrainConfig, train

CONFIG = TrainConfig(
    vocab_size=16,
    context=8,
    width=16,
    num_layers=2,
    num_heads=2,
    global_batch=8,
    micro_batch=2,
    steps=5,
    warmup=1,
    num_sequences=26,
    num_eval_sequences=0,
    lr=1e-2,
    max_norm=0.5,
    quiet=True,
)


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"BLOCKED: {package} is not installed (the extra 'peers')",
    )


# ------------------------------------------------------------------------------ without them


@pytest.mark.parametrize("recipe", [deepspeed_config, megatron_arguments, megatron_settings])
def test_what_a_recipe_cannot_say_is_an_error_that_names_it(recipe):
    wrong = {"dp 3 x pp 1 x cp 1 x tp 1 = 3, but there are 4": {"dp": 3}, "precision fp64": {}}
    for message, change in wrong.items():
        config = replace(CONFIG, precision="fp64" if "fp64" in message else "fp32", **change)
        with pytest.raises(ValueError, match=message):
            recipe(config, 4)
    with pytest.raises(ValueError, match="num_experts 4: its layers are dense"):
        recipe(replace(CONFIG, num_experts=4), 4)
    only = {
        deepspeed_config: {
            "tp 2: its layers": {"tp": 2},
            "cp 2: its sequences": {"cp": 2},
            "virtual_stages 2": {"pp": 2, "virtual_stages": 2, "num_layers": 4, "micro_batch": 1},
            "tied weights on pp 2": {"pp": 2, "tied": True},
        }
    }.get(recipe, {"zero 2: its distributed optimizer is ZeRO-1": {"zero": 2}})
    for message, change in only.items():
        with pytest.raises(ValueError, match=message):
            recipe(replace(CONFIG, **change), 4)


def test_deepspeeds_configuration():
    for zero in (0, 1, 2, 3):
        settings = deepspeed_config(replace(CONFIG, zero=zero, precision="bf16"), 2)
        assert settings["zero_optimization"]["stage"] == zero
        # DeepSpeed itself refuses a configuration in which this does not hold.
        assert (
            settings["train_batch_size"]
            == 8
            == (
                settings["train_micro_batch_size_per_gpu"]
                * settings["gradient_accumulation_steps"]
                * 2
            )
        )
        assert (settings["bf16"], settings["fp16"]) == ({"enabled": True}, {"enabled": False})
    piped = deepspeed_config(replace(CONFIG, pp=2), 4)
    assert piped["gradient_accumulation_steps"] == 2
    assert piped["gradient_clipping"] == 0.5


def test_megatrons_arguments():
    config = replace(
        CONFIG,
        tp=2,
        pp=2,
        num_layers=8,
        virtual_stages=2,
        sequence_parallel=True,
        zero=1,
        precision="bf16",
        micro_batch=1,
    )
    words = megatron_arguments(config, 8)
    said = {w: words[i + 1] for i, w in enumerate(words[:-1]) if not words[i + 1].startswith("--")}
    assert said["--num-layers-per-virtual-pipeline-stage"] == "2"  # 8 layers on 2 ranks of 2 chunks
    assert said["--tensor-model-parallel-size"] == said["--pipeline-model-parallel-size"] == "2"
    assert (said["--hidden-size"], said["--ffn-hidden-size"]) == ("16", "64")
    flags = {word for word in words if word.startswith("--")} - set(said)
    assert flags == {
        "--mock-data",
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--bf16",
        "--untie-embeddings-and-output-weights",
    }
    assert len(words) == len(set(w for w in words if w.startswith("--"))) + len(said)
    env = {**os.environ, "WORLD_SIZE": "4"}
    command = [sys.executable, "-m", "minidist.peers.megatron", "--tp", "2", "--zero", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == megatron_arguments(TrainConfig(tp=2, zero=1), 4)


# ------------------------------------------------------------------------------ where installed


def both(changes):
    """The loss curves of minidist and DeepSpeed, on the same ranks."""
    dist.init_process_group("gloo")
    curves = [(train(replace(CONFIG, **c)), train_deepspeed(replace(CONFIG, **c))) for c in changes]
    dist.barrier()
    dist.destroy_process_group()
    return curves


@needs("deepspeed")
@pytest.mark.parametrize("n", [1, 2])
def test_deepspeed_zero_has_our_loss_curve(n):
    changes = [{"zero": zero} for zero in (0, 1, 2, 3)] + [{"tied": True, "zero": 1}]
    for curves in run(both, n, changes, deadline_s=200):
        for ours, theirs in curves:
            assert theirs == pytest.approx(ours, rel=2e-4)
            assert len(theirs) == CONFIG.steps


@needs("deepspeed")
@pytest.mark.parametrize("n", [2, 4])
def test_deepspeeds_pipeline_has_our_loss_curve(n):
    # Without clipping: DeepSpeed's stages clip each by its own norm.
    for ((ours, theirs),) in run(both, n, [{"pp": 2, "max_norm": 1e9}], deadline_s=200):
        assert theirs == pytest.approx(ours, rel=2e-4)


def count_megatron(config):
    dist.init_process_group("gloo")
    own = sum(p.numel() for p in build_megatron(config, dist.get_world_size()).parameters())
    dist.barrier()
    dist.destroy_process_group()
    return own


@needs("megatron")
def test_megatron_builds_the_same_model():
    """Parameters of all ranks, less what tensor parallelism has on both: norms, and two biases."""
    whole = num_parameters(GPT(CONFIG.model))
    assert run(count_megatron, 1, CONFIG) == [whole]
    d = CONFIG.width
    replicated = CONFIG.num_layers * (4 * d + 2 * d) + 2 * d + CONFIG.context * d
    assert run(count_megatron, 2, replace(CONFIG, tp=2)) == [(whole + replicated) // 2] * 2
    assert sum(run(count_megatron, 2, replace(CONFIG, pp=2))) == whole
