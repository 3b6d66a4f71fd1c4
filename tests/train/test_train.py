"""The training program: the same curve on any layout, checkpoints, and the command line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from interrupted_training import interrupted, whole_and_in_two_parts

from minidist.checkpoint import CheckpointError
from minidist.data import make_tokens
from minidist.launch import run
from minidist.lr import lr_at
from minidist.model import GPT, lm_loss
from minidist.processes.ports import free_port
from minidist.train import TrainConfig, parse_args, train

CONFIG = TrainConfig(
    vocab_size=13,
    context=8,
    width=12,
    num_layers=2,
    num_heads=6,
    global_batch=4,
    micro_batch=1,
    steps=10,
    num_sequences=26,
    num_eval_sequences=7,
    eval_every=5,
    lr=1e-2,
    max_norm=0.5,
    precision="fp64",
    quiet=True,
    save_every=3,
)


def one_process(config):
    """The same training, written without any of the course's parallel code."""
    torch.manual_seed(config.seed)
    model = GPT(config.model).double()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay)
    shape = (config.context, config.vocab_size)
    tokens, targets = make_tokens(config.num_sequences, *shape, seed=config.seed)
    eval_tokens, eval_targets = make_tokens(config.num_eval_sequences, *shape, config.seed + 1)
    per_epoch = config.num_sequences // config.global_batch
    losses, evals = [], {}
    for step in range(config.steps):
        epoch, at = divmod(step, per_epoch)
        order = torch.randperm(
            config.num_sequences, generator=torch.Generator().manual_seed(config.seed + epoch)
        )
        picked = order[at * config.global_batch : (at + 1) * config.global_batch]
        loss = lm_loss(model(tokens[picked]), targets[picked])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.param_groups[0]["lr"] = lr_at(
            step, peak_lr=config.lr, warmup_steps=config.warmup_steps, total_steps=config.steps
        )
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % config.eval_every == 0:
            with torch.no_grad():
                evals[step + 1] = lm_loss(model(eval_tokens), eval_targets).item()
    return losses, evals


def train_all(configs):
    """Several runs on the same ranks, in a process group of this test's."""
    dist.init_process_group("gloo")
    results = []
    for config in configs:
        records = []
        losses = train(config, on_step=records.append)
        results.append((losses, {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}))
    dist.barrier()
    dist.destroy_process_group()
    return results


LAYOUTS = {
    1: [{}],
    2: [{"pp": 2, "tied": True}, {"zero": 3}],
    3: [{"tp": 3}, {"zero": 2, "global_batch": 6}],
    4: [
        {"tp": 2, "zero": 1},
        {"tp": 2, "pp": 2, "tied": True},
        {"cp": 2, "zero": 3},
        {"tp": 2, "cp": 2, "sequence_parallel": True},
    ],
}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_the_curve_does_not_depend_on_the_layout(world_size):
    """Ten steps over two epochs of 26 sequences, and evaluations on 7, which nothing divides."""
    configs = [replace(CONFIG, **layout) for layout in LAYOUTS[world_size]]
    for results in run(train_all, world_size, configs, deadline_s=120):
        for config, (losses, evals) in zip(configs, results, strict=True):
            expected = one_process(config)
            torch.testing.assert_close(losses, expected[0], rtol=1e-11, atol=0)
            assert evals == pytest.approx(expected[1], rel=1e-11)


RECOMPUTED = {
    1: [{}],
    2: [{"pp": 2, "tied": True}, {"zero": 3}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}],
    4: [{"tp": 2, "pp": 2, "sequence_parallel": True}, {"cp": 2, "zero": 3}, {"zero": 2}, {}],
}


@pytest.mark.parametrize("world_size", RECOMPUTED)
def test_recomputation_changes_memory_only(world_size):
    """With dropout: the second forward draws the masks of the first."""
    configs = [
        replace(CONFIG, dropout=0.2, steps=4, warmup=1, recompute=recompute, **layout)
        for layout in RECOMPUTED[world_size]
        for recompute in (False, True)
    ]
    results = run(train_all, world_size, configs, deadline_s=120)[0]
    for once, twice in zip(results[::2], results[1::2], strict=True):
        torch.testing.assert_close(twice[0], once[0], rtol=1e-11, atol=0)
        assert twice[1] == pytest.approx(once[1], rel=1e-11)


def test_half_precision_follows_single():
    full = train(replace(CONFIG, precision="fp32", width=24))
    layout = {"tp": 2, "zero": 1, "width": 24}
    configs = [replace(CONFIG, precision=precision, **layout) for precision in ("bf16", "fp16")]
    for results in run(train_all, 4, configs):
        for losses, _ in results:
            assert losses == pytest.approx(full, rel=0.02)
            assert losses != pytest.approx(full, rel=1e-6)  # it was half precision


@pytest.mark.slow
def test_a_run_that_was_told_to_end_goes_on_bit_for_bit(tmp_path):
    """Dropout, AdamW, order of samples over an epoch's end: all of it goes on."""
    layouts = [
        {"pp": 2, "tied": True, "precision": "fp32"},
        {"tp": 2, "sequence_parallel": True, "zero": 2, "precision": "bf16"},
        {"cp": 2, "zero": 3, "precision": "bf16"},
    ]
    base = replace(CONFIG, dropout=0.2, save_every=100)
    configs = [replace(base, **layout, out=str(tmp_path / str(layout))) for layout in layouts]
    for results in run(whole_and_in_two_parts, 4, configs, 5, 2, deadline_s=120):
        for config, (whole, first, rest) in zip(configs, results, strict=True):
            assert len(first) == 5, config
            assert first + rest == whole, config


def test_and_so_it_does_in_new_processes(tmp_path):
    """With the loss scale; the records are those of one run."""
    config = replace(CONFIG, dropout=0.2, tp=2, zero=1, precision="fp16", save_every=100)
    whole = run(interrupted, 4, config, -1, 1)
    config = replace(config, out=str(tmp_path))
    first = run(interrupted, 4, config, 5, 1)
    # What a run wrote that died later, in the midst of a line.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 0.0}\n{"step": 7')
    rest = run(interrupted, 4, config, -1, 1)
    assert [len(losses) for losses in first] == [5] * 4
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 11))
    assert [record["loss"] for record in records] == whole[0]
    assert all(record["tokens_per_s"] > 0 and record["lr"] > 0 for record in records)


def test_a_run_goes_on_with_other_layouts(tmp_path):
    """4 ranks, then 2, 3, 1 and 4 others: the curve is that of one process."""
    config = replace(CONFIG, global_batch=6, num_sequences=32, out=str(tmp_path), tied=True)
    losses = []
    for end, world_size, layout in [
        (2, 4, {"tp": 2, "zero": 3, "dp": 2}),
        (4, 2, {"pp": 2, "zero": 1}),
        (6, 3, {"zero": 2}),
        (7, 1, {}),
        (9, 4, {"tp": 2, "pp": 2}),
        (10, 3, {"tp": 3, "zero": 1}),
    ]:
        part = replace(config, **layout)
        every = run(interrupted, world_size, part, end if end < 10 else -1, min(1, world_size - 1))
        assert all(each == every[0] for each in every)
        losses += every[0]
    expected, _ = one_process(config)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)


def other_model(config):
    dist.init_process_group("gloo")
    with pytest.raises(CheckpointError, match=r"made with width 12, now 24, .*seed 0, now 1"):
        train(replace(config, width=24, seed=1))
    assert len(train(replace(config, resume=False, steps=3))) == 3  # from the start
    dist.barrier()
    dist.destroy_process_group()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    config = replace(CONFIG, steps=4, out=str(tmp_path))
    assert len(train(config)) == 4
    run(other_model, 2, config)


def refused(configs):
    dist.init_process_group("gloo")
    for config, text in configs:
        with pytest.raises(ValueError, match=text):
            train(config)
    losses = train(replace(CONFIG, steps=1, global_batch=3))  # the ranks are still in step
    dist.barrier()
    dist.destroy_process_group()
    return losses


def test_wrong_configurations_end_on_every_rank_with_the_arithmetic():
    configs = [
        (replace(CONFIG, dp=2, tp=2), r"dp 2 x pp 1 x cp 1 x tp 2 = 4, but there are 3 ranks"),
        (replace(CONFIG, tp=2), r"= 2 ranks hold the model once; 3 ranks = 1 x 2 \+ 1: 1 is left"),
        (replace(CONFIG, tp=4), r"tp 4 = 4 ranks .* 3 ranks = 0 x 4 \+ 3: 3 are left over"),
        (replace(CONFIG), r"global batch 4 = dp 3 x micro-batch 1 x 1 \+ 1: 1 sequences are left"),
        (replace(CONFIG, pp=3), r"2 layers do not divide by pp = 3: 2 / 3 = 0.6667"),
        (replace(CONFIG, pp=3, zero=3, num_layers=3), r"ZeRO-3 with pp 3"),
        (replace(CONFIG, num_heads=5), r"width 12 cannot be split into 5"),
        (replace(CONFIG, steps=0), r"steps must be positive, got 0"),
        (replace(CONFIG, warmup=10), r"below the 10 steps, got 10"),
        (replace(CONFIG, precision="int8"), r"precision is one of .*, got 'int8'"),
        (replace(CONFIG, global_batch=30), r"global batch of 30 .* there are 26"),
        (replace(CONFIG, dropout=1.0), r"dropout must be .*, got 1.0"),
    ]
    losses = run(refused, 3, configs)
    assert losses == [losses[0]] * 3


def test_options_of_the_command_line():
    config = parse_args(
        ["--tp", "2", "--zero", "1", "--sequence-parallel", "--out", "x", "--no-resume"]
    )
    assert config == TrainConfig(tp=2, zero=1, sequence_parallel=True, out="x", resume=False)
    assert parse_args([]) == TrainConfig()
    with pytest.raises(SystemExit):
        parse_args(["--zero", "4"])


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-port", str(free_port()), "-m", "minidist.train"]
    options = ["--tp", "2", "--steps", "12", "--precision", "bf16", "--global-batch", "4"]
    options += ["--out", str(tmp_path), "--eval-every", "6"]
    done = subprocess.run([*torchrun, *options], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "dp 1 x pp 1 x cp 1 x tp 2 on cpu, bf16, from step 0"
    assert "\x1b" not in done.stdout  # no terminal, no control characters
    assert [line.split("]")[1].split()[0] for line in lines[1:]] == ["1/12", "10/12", "12/12"]
    assert "tokens/s" in lines[-1]
    assert "eval" in lines[-1]
    assert "MFU" not in done.stdout  # the peak of a CPU is not known
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["eval_perplexity"] == pytest.approx(math.exp(records[-1]["eval_loss"]))
    assert records[-1]["loss"] < records[0]["loss"]
    # A wrong layout is one line, alone as well.
    alone = [sys.executable, "-m", "minidist.train", "--tp", "2"]
    done = subprocess.run(alone, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "python -m minidist.train: error: pp 1 x cp 1 x tp 2 = 2 ranks hold the model once; "
        "1 ranks = 0 x 2 + 1: 1 is left over"
    ]
