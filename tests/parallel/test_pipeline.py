"""The pipeline executor and its neighbours on real ranks, against one process in float64."""

from __future__ import annotations

import copy
import functools
import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from minidist import emulate
from minidist.data import make_images, make_tokens
from minidist.emulate import Charged, ChargePlan, Cluster, Link
from minidist.errors import LaunchError, MismatchError
from minidist.launch import run
from minidist.mesh import make_mesh
from minidist.model import GPT, GPTConfig, ResNet, lm_loss
from minidist.parallel.pipeline import (
    ModelParallel,
    PipeDreamExecutor,
    PipelineExecutor,
    StageTimes,
    TensorSpec,
    balance,
    gather_timeline,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    simulate,
    split_model,
    staleness,
    zb_h1,
)
from minidist.parallel.pipeline.backward import SplitBackward
from minidist.parallel.pipeline.model_parallel import forward_backward, naive_utilisation
from minidist.parallel.pipeline.native import NativePipeline

STEPS = 10
# float64, sums in another order; and after steps of an optimizer that magnifies what differs
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)
about = functools.partial(torch.testing.assert_close, rtol=1e-7, atol=1e-9)


def make_model(tied: bool = False) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=12, context=5, width=8, num_layers=6, num_heads=2, mlp_ratio=2, tied=tied
    )
    return GPT(config).double()


def batches(num_sequences: int, num_batches: int = STEPS):
    inputs, targets = make_tokens(num_batches * num_sequences, 5, 12)
    return zip(inputs.split(num_sequences), targets.split(num_sequences), strict=True)


def optimizer_of(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


@functools.cache
def train_alone(num_sequences: int, tied: bool = False):
    """One process: losses of all steps, gradients of the first, parameters at the end."""
    model = make_model(tied)
    optimizer = optimizer_of(model.parameters())
    losses, gradients = [], {}
    for inputs, targets in batches(num_sequences):
        optimizer.zero_grad()
        loss = lm_loss(model(inputs), targets)
        loss.backward()
        gradients = gradients or {
            n: gradient(p) for n, p in model.named_parameters(remove_duplicate=False)
        }
        optimizer.step()
        losses.append(loss.detach())
    return losses, gradients, model


# Partition --------------------------------------------------------------------------------------


@settings(max_examples=100, derandomize=True, deadline=None)
@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_no_contiguous_partition_is_better(costs, data):
    k = data.draw(st.integers(1, len(costs)))
    parts = balance(costs, k)
    assert [i for part in parts for i in part] == list(range(len(costs)))
    assert all(len(part) > 0 for part in parts)
    largest = max(sum(costs[i] for i in part) for part in parts)
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), k - 1)
    )
    assert largest == best


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
def test_stages_of_a_gpt_are_the_gpt(num_stages, tied):
    model = make_model(tied)
    stages = split_model(model, num_stages)
    tokens, _ = make_tokens(3, 5, 12)
    x = tokens
    for stage in stages:
        x = stage(x)
    torch.testing.assert_close(x, model(tokens))
    names = [name for stage in stages for name in stage.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    # With ten times the cost on the embeddings they stand alone.
    if num_stages == 3:
        costs = [10, *[1] * 6, 10]
        assert [len(stage.blocks) for stage in split_model(model, 3, costs)] == [0, 6, 0]


def test_stages_of_a_resnet_and_of_a_sequential():
    torch.manual_seed(0)
    images, _ = make_images(4)
    model = ResNet(width=4).eval()
    for k in (1, 2, 5):
        stages = split_model(model, k)
        torch.testing.assert_close(nn.Sequential(*stages)(images), model(images))
        assert sorted(n for s in stages for n in s.state_dict()) == sorted(model.state_dict())
    with pytest.raises(ValueError, match="cannot cut 5 units into 6 stages"):
        split_model(model, 6)
    with pytest.raises(ValueError, match="5 units need as many costs, got 2"):
        split_model(model, 2, [1, 2])
    with pytest.raises(ValueError, match=r"expected an nn.Sequential, a GPT .* got Linear"):
        split_model(nn.Linear(2, 2), 2)


# The backward pass in two halves ----------------------------------------------------------------


class Odd(nn.Module):
    """Frozen, unused and multi-input weights, a branch, and outputs of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.scale, self.unused = nn.Parameter(torch.ones(6)), nn.Linear(6, 6)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.b.weight.requires_grad_(False)

    def forward(self, x):
        left, right = self.a(x).chunk(2, -1)
        y = torch.cat([left, left * right.detach()], -1) * (self.scale * self.gate)
        return x + torch.tanh(self.b(y)) + self.scale + self.gate


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        return self.norm(torch.relu(self.layer(self.norm(self.layer(x)))))


class Constant(nn.Module):
    """Its output does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.weight.expand(x.shape) * 2


@pytest.mark.parametrize("make", [Odd, UsedTwice, Constant, lambda: make_model().blocks[0]])
def test_two_halves_are_one_backward(make):
    torch.manual_seed(0)
    stage = make().double()
    twin = copy.deepcopy(stage)
    width = 8 if isinstance(stage, type(make_model().blocks[0])) else 6
    for _ in range(2):  # gradients add up
        x = torch.randn(3, 4, width, dtype=torch.float64, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        y, expected = stage(x), twin(other)
        dy = torch.randn_like(y)
        before = [None if p.grad is None else p.grad.clone() for p in stage.parameters()]
        split = SplitBackward(x, y)
        got = split.input_gradient(dy)
        for parameter, old in zip(stage.parameters(), before, strict=True):
            assert (parameter.grad is None) == (old is None)
            assert old is None or torch.equal(parameter.grad, old)
        split.weight_gradients()
        expected.backward(dy)
        zeros = torch.zeros_like(x)
        close(got, zeros if other.grad is None else other.grad)
        for ours, theirs in zip(stage.parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                close(ours.grad, theirs.grad)


def test_two_halves_do_the_arithmetic_of_one_backward():
    stage = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.randn(8, 16, requires_grad=True)
    flops = []
    for halves in (False, True):
        y = stage(x)
        with FlopCounterMode(display=False) as count:
            if halves:
                split = SplitBackward(x, y)
                split.input_gradient(torch.ones_like(y))
                assert count.get_total_flops() == 4 * 2 * 8 * 16 * 16
                split.weight_gradients()
            else:
                y.backward(torch.ones_like(y))
        flops.append(count.get_total_flops())
    assert flops[0] == flops[1] == 2 * 4 * 2 * 8 * 16 * 16


# The executor against one process ---------------------------------------------------------------


BATCH = 12


def cases(p: int):
    """Schedules, and whether embeddings are tied. Every m divides the batch."""
    uneven = {1: 3, 2: 3, 3: 4, 4: 6}[p]  # no multiple of p
    even = {1: 2, 2: 4, 3: 6, 4: 4}[p]
    yield naive(p, uneven), False
    yield gpipe(p, uneven), False
    yield one_f_one_b(p, uneven), True
    yield one_f_one_b(p, 1), False  # fewer micro-batches than ranks
    yield zb_h1(p, uneven), False
    yield zb_h1(p, 3), True
    yield interleaved(p, even, 2), True
    if p <= 2:
        yield interleaved(p, p, 3), False


def train_by_every_schedule():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, p = dist.get_rank(), dist.get_world_size()
    for schedule, tied in cases(p):
        name = f"{schedule.name}, {p} ranks"
        losses, gradients, oracle = train_alone(BATCH, tied)
        stages = split_model(make_model(tied), schedule.num_stages)[rank::p]
        optimizer = optimizer_of([w for stage in stages for w in stage.parameters()])
        pipeline = PipelineExecutor(stages, schedule, lm_loss, record=True)
        spans = ()
        for step, (inputs, targets) in enumerate(batches(BATCH)):
            optimizer.zero_grad()
            result = pipeline.step(inputs, targets)
            assert (result.loss is not None) == (rank == p - 1)
            if result.loss is not None:
                close(result.loss, losses[step], msg=name)
            if step == 0:
                for stage in stages:
                    for key, weight in stage.named_parameters():
                        close(weight.grad, gradients[key], msg=name)
            optimizer.step()
            spans = result.spans
            # As many activations as the simulator says, and a timeline in its form.
            assert result.peak_activations == simulate(schedule).peak_activations[rank]
            assert tuple(span.action for span in spans) == schedule.actions[rank]
        trained = dict(oracle.named_parameters(remove_duplicate=False))
        for stage in stages:
            for key, weight in stage.named_parameters():
                about(weight, trained[key], msg=name)

        # Evaluation changes nothing and needs no gradients.
        inputs, targets = next(iter(batches(BATCH)))
        result = pipeline.evaluate(inputs, targets)
        assert all(stage.training for stage in stages)
        if rank == p - 1:
            assert result.loss is not None
            assert result.output is not None
            logits = oracle(inputs)
            torch.testing.assert_close(result.output, logits, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(result.loss, lm_loss(logits, targets), rtol=1e-6, atol=1e-8)

        timeline = gather_timeline(schedule, spans)
        assert 0 <= timeline.bubble_fraction < 1
        end = {(r, s.action): s.end_s for r, row in enumerate(timeline.spans) for s in row}
        for r, row in enumerate(timeline.spans):
            for span in row:
                for need in schedule.needs(r, span.action):
                    assert end[need] <= span.start_s
    train_as_torch_does(rank, p)
    train_in_parallel_on_data(rank, p)
    dist.barrier()
    dist.destroy_process_group()


def train_as_torch_does(rank: int, p: int) -> None:
    """torch.distributed.pipelining on the same stages: same loss, same gradients."""
    if p == 1:
        return
    even, uneven = {2: 4, 3: 6, 4: 4}[p], {2: 3, 3: 4, 4: 6}[p]
    losses, gradients, oracle = train_alone(BATCH)
    trained = dict(oracle.named_parameters())
    for name, chunks in (("GPipe", 1), ("1F1B", 1), ("interleaved 1F1B", 2), ("zero bubble", 2)):
        stages = split_model(make_model(), p * chunks)[rank::p]
        optimizer = optimizer_of([w for stage in stages for w in stage.parameters()])
        pipeline = NativePipeline(stages, name, uneven if chunks == 1 else even, lm_loss)
        for step, (inputs, targets) in enumerate(batches(BATCH)):
            optimizer.zero_grad()
            loss = pipeline.step(inputs, targets)
            if rank == p - 1:
                close(loss, losses[step], msg=name)
            for stage in stages if step == 0 else ():
                for key, weight in stage.named_parameters():
                    close(weight.grad, gradients[key], msg=name)
            optimizer.step()
        for stage in stages:
            for key, weight in stage.named_parameters():
                about(weight, trained[key], msg=name)


def train_in_parallel_on_data(rank: int, p: int) -> None:
    """Data parallelism with the same global batch has the loss curve of the pipeline."""
    model = DistributedDataParallel(make_model())
    optimizer = optimizer_of(model.parameters())
    stage = split_model(make_model(), p)[rank]
    pipeline = PipelineExecutor(stage, one_f_one_b(p, 4), lm_loss)
    own = optimizer_of(stage.parameters())
    for inputs, targets in batches(BATCH):
        mine = slice(BATCH // p * rank, BATCH // p * (rank + 1))
        loss = lm_loss(model(inputs[mine]), targets[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        own.zero_grad()
        result = pipeline.step(inputs, targets)
        own.step()
        if result.loss is not None:
            about(result.loss, mean / p)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_schedule_trains_as_one_process_does(num_ranks):
    run(train_by_every_schedule, num_ranks, deadline_s=240)


# PipeDream --------------------------------------------------------------------------------------


def simulate_delayed_weights(p: int, m: int):
    """One process: mini-batch t meets the weights of stage r after max(0, t - (p-1-r)) updates."""
    stages = split_model(make_model(), p)
    optimizers = [optimizer_of(stage.parameters()) for stage in stages]
    versions = [[copy.deepcopy(stage)] for stage in stages]
    losses = []
    for t, (inputs, targets) in enumerate(batches(2, m)):
        used = [versions[r][max(0, t - (p - 1 - r))] for r in range(p)]
        for stage in used:
            stage.zero_grad()
        loss = lm_loss(nn.Sequential(*used)(inputs), targets)
        loss.backward()
        losses.append(loss.detach())
        for r in range(p):
            for weight, source in zip(stages[r].parameters(), used[r].parameters(), strict=True):
                weight.grad = gradient(source)
            optimizers[r].step()
            versions[r].append(copy.deepcopy(stages[r]))
    return torch.stack(losses), stages


def train_with_pipedream(m: int):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, p = dist.get_rank(), dist.get_world_size()
    inputs, targets = map(torch.cat, zip(*batches(2, m), strict=True))
    losses, oracle = simulate_delayed_weights(p, m)
    schedule = pipedream(p, m)
    stage = split_model(make_model(), p)[rank]
    pipeline = PipeDreamExecutor(stage, schedule, lm_loss, optimizer_of(stage.parameters()))
    result = pipeline.step(inputs, targets)
    for ours, expected in zip(stage.parameters(), oracle[rank].parameters(), strict=True):
        about(ours, expected)
    if rank == p - 1:
        close(result.losses, losses)
        close(result.loss, losses.mean())
    assert result.staleness == staleness(schedule)[rank]
    assert result.peak_versions == result.peak_activations == p - rank
    assert pipeline.num_updates == m

    # Without stashing, backward meets other weights than forward did: not those parameters.
    stage = split_model(make_model(), p)[rank]
    pipeline = PipeDreamExecutor(
        stage, schedule, lm_loss, optimizer_of(stage.parameters()), stash_weights=False
    )
    pipeline.step(inputs, targets)
    pairs = zip(stage.parameters(), oracle[rank].parameters(), strict=True)
    differs = not all(torch.allclose(ours, expected) for ours, expected in pairs)
    assert differs == (p > 1)

    # A second run goes on where the first one ended; evaluation works in between.
    evaluated = pipeline.evaluate(inputs, targets)
    assert (evaluated.loss is not None) == (rank == p - 1)
    assert pipeline.step(inputs, targets).staleness == result.staleness
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_pipedream_is_training_with_delayed_weights(num_ranks):
    run(train_with_pipedream, num_ranks, STEPS, deadline_s=120)


# Model parallelism ------------------------------------------------------------------------------


def train_resnet_halves():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, p = dist.get_rank(), dist.get_world_size()
    images, labels = make_images(8, num_classes=4, size=8)
    images = images.double()
    torch.manual_seed(0)
    alone = ResNet(num_classes=4, width=4).double()
    start = copy.deepcopy(alone)
    loss_fn = nn.functional.cross_entropy

    # One process with a list of devices, and one process per stage; both with the whole batch,
    # so that BatchNorm sees what it sees alone.
    spread = ModelParallel(split_model(copy.deepcopy(start), p), ["cpu"] * p)
    stages = split_model(start, p)
    stage = stages[rank]
    spec = None
    if rank:
        with torch.no_grad():
            spec = TensorSpec.of(nn.Sequential(*copy.deepcopy(stages[:rank]))(images))
    piped = copy.deepcopy(stage)
    pipeline = PipelineExecutor(piped, gpipe(p, 1), loss_fn)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (alone, spread, stage, piped)]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = loss_fn(alone(images), labels)
        expected.backward()
        loss = loss_fn(spread(images), labels)
        loss.backward()
        close(loss, expected)
        loss = forward_backward(stage, loss_fn, inputs=images, targets=labels, input_spec=spec)
        if rank == p - 1:
            close(loss, expected.detach())
        pipeline.step(images, labels)
        for optimizer in optimizers:
            optimizer.step()
    expected = alone.state_dict()
    for each in (stage, piped):
        for key, tensor in each.state_dict().items():  # running statistics too
            about(tensor, expected[key])
    for ours, theirs in zip(spread.parameters(), alone.parameters(), strict=True):
        about(ours, theirs)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_model_parallel_resnet(num_ranks):
    run(train_resnet_halves, num_ranks, deadline_s=120)


def test_model_parallel_arguments():
    with pytest.raises(ValueError, match="got 1 devices for 2 stages"):
        ModelParallel([nn.Linear(2, 2), nn.Linear(2, 2)], ["cpu"])
    assert naive_utilisation(4) == 1 - simulate(naive(4, 3)).bubble_fraction == 0.25
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        naive_utilisation(0)


# Groups, dtypes, wrong use ----------------------------------------------------------------------


def train_on_a_mesh():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = make_mesh(dp=2, pp=2)
    rank = mesh.coordinate("pp")
    stage = split_model(make_model(tied=True), 2)[rank]
    pipeline = PipelineExecutor(stage, one_f_one_b(2, 3), lm_loss, group=mesh.group("pp"))
    _, gradients, _ = train_alone(BATCH, tied=True)
    inputs, targets = next(iter(batches(BATCH)))
    half = slice(6 * mesh.coordinate("dp"), 6 * mesh.coordinate("dp") + 6)
    pipeline.step(inputs[half], targets[half])
    for key, weight in stage.named_parameters():
        dist.all_reduce(weight.grad, group=mesh.group("dp"))
        close(weight.grad / 2, gradients[key])
    dist.barrier()
    dist.destroy_process_group()


def test_a_pipeline_runs_on_a_group_of_a_mesh():
    run(train_on_a_mesh, 4, deadline_s=120)


def expect(error: type[Exception], match: str, call) -> None:
    with pytest.raises(error, match=match):
        call()


class Changes(nn.Module):
    """Gives another shape or dtype from the third call on; the first one is to learn the shape."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.layer = how, 0, nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        self.calls += 1
        if self.calls > 2:
            return y[:, :3] if self.how == "shape" else y.to(torch.float64)
        return y


def use_wrongly():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    layer, mse = nn.Linear(4, 4), nn.functional.mse_loss
    schedule = one_f_one_b(2, 2)

    # Found without communication.
    expect(
        ValueError,
        f"1F1B is for 3 ranks, but the group has 2 .rank {rank}.",
        lambda: PipelineExecutor(layer, one_f_one_b(3, 3), mse),
    )
    expect(
        ValueError,
        f"needs 1 stages on every rank, got 2 on rank {rank}",
        lambda: PipelineExecutor([layer, layer], schedule, mse),
    )
    expect(
        ValueError,
        "specs need one entry per stage, 2, got 1",
        lambda: PipelineExecutor(
            layer, schedule, mse, specs=[TensorSpec((2, 4), layer.weight.dtype)]
        ),
    )
    expect(
        ValueError, "use PipeDreamExecutor", lambda: PipelineExecutor(layer, pipedream(2, 2), mse)
    )
    sgd = torch.optim.SGD(layer.parameters())
    expect(
        ValueError,
        "expected a schedule with updates",
        lambda: PipeDreamExecutor(layer, schedule, mse, sgd),
    )
    expect(
        ValueError,
        "tied embeddings",
        lambda: PipeDreamExecutor(
            split_model(make_model(True), 2)[rank], pipedream(2, 2), mse, sgd
        ),
    )
    expect(
        ValueError, "expected one of .*got '2F2B'", lambda: NativePipeline(layer, "2F2B", 2, mse)
    )
    expect(
        ValueError,
        "GPipe takes one stage per rank, got 2",
        lambda: NativePipeline([layer, layer], "GPipe", 2, mse),
    )
    x = torch.ones(4, 4)
    pipeline = PipelineExecutor(layer, schedule, mse)
    needs = "inputs" if rank == 0 else "targets"
    expect(ValueError, f"rank {rank} needs {needs}, got None", lambda: pipeline.step())
    expect(
        ValueError,
        f"{needs} of 3 samples do not split into 2 equal micro-batches",
        lambda: pipeline.step(x[:3], x[:3]),
    )
    needs = "inputs" if rank == 0 else "input_spec"
    expect(ValueError, f"rank {rank} needs {needs}, got None", lambda: forward_backward(layer, mse))

    # A stage that does not fit the one before: every rank is told, by name.
    wide = PipelineExecutor(nn.Linear(4, 4) if rank == 0 else nn.Linear(5, 4), schedule, mse)
    expect(
        MismatchError,
        r"\[rank 1\] stage 1 cannot take the output of stage 0, float32 \[2, 4\]",
        lambda: wide.step(x, x),
    )
    double = PipelineExecutor(layer if rank == 0 else nn.Linear(4, 4).double(), schedule, mse)
    expect(
        MismatchError,
        r"\[rank 1\] stage 1 cannot take .* float32 \[2, 4\]: RuntimeError",
        lambda: double.step(x, x),
    )

    other = [TensorSpec((2, 4 + rank), torch.float32)] * 2
    told = PipelineExecutor(layer, schedule, mse, specs=other)
    text = r"\[rank 1\] specs differ: expected .*float32 \[2, 4\].* as on rank 0, got .*\[2, 5\]"
    expect(MismatchError, text, lambda: told.step(x, x))
    with torch.no_grad():
        expect(ValueError, "gradients are switched off.*use evaluate", lambda: pipeline.step(x, x))

    # Half precision.
    half = PipelineExecutor(nn.Linear(4, 4).bfloat16(), schedule, mse)
    result = half.step(x.bfloat16(), x.bfloat16(), output=True)
    assert rank == 0 or TensorSpec.of(result.output) == TensorSpec((4, 4), torch.bfloat16)

    # Frozen stages train nothing and are in nobody's way.
    frozen = nn.Linear(4, 4).requires_grad_(rank == 1)
    for build in (gpipe, zb_h1):
        PipelineExecutor(frozen, build(2, 2), mse).step(x, x)
        assert (frozen.weight.grad is None) == (rank == 0)

    # A batch that cannot be split, or is not there: all ranks hear of it before they wait.
    for first, last, text in (
        (None, x, "rank 0 needs inputs, got None"),
        (x, None, "rank 1 needs targets, got None"),
        (torch.ones(3, 4), x, r"inputs of 3 samples do not split into 2 .*\(rank 0\)"),
    ):
        fresh = PipelineExecutor(layer, schedule, mse)
        expect(ValueError, text, lambda fresh=fresh, a=first, b=last: fresh.step(a, b))

    # Another size of batch in a later step.
    pipeline.step(x, x)
    if rank == 0:
        expect(
            MismatchError,
            r"\[rank 0\] micro-batches changed: expected float32 \[2, 4\] as in the "
            r"first step, got float32 \[4, 4\]",
            lambda: pipeline.step(torch.ones(8, 4), x),
        )
    dist.barrier()
    dist.destroy_process_group()


def test_wrong_use_is_named():
    run(use_wrongly, 2, deadline_s=120)


def send_something_else(how: str):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    stage = Changes(how) if dist.get_rank() == 0 else nn.Linear(4, 4)
    x = torch.ones(4, 4)
    PipelineExecutor(stage, gpipe(2, 2), nn.functional.mse_loss).step(x, x)


@pytest.mark.parametrize(
    ("how", "got"), [("shape", r"float32 \[2, 3\]"), ("dtype", r"float64 \[2, 4\]")]
)
def test_an_output_that_is_not_the_agreed_one(how, got):
    text = rf"\[rank 0\] stage 0, F1: expected output float32 \[2, 4\], got {got}"
    with pytest.raises(LaunchError, match=text):
        run(send_something_else, 2, how)


# On the emulated cluster ------------------------------------------------------------------------


def run_charged(name: str, p: int, m: int, v: int):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stages = [Charged(nn.Linear(8, 8), rank) for _ in range(v)]
    schedule = interleaved(p, m, v) if v > 1 else {"GPipe": gpipe, "1F1B": one_f_one_b}[name](p, m)
    specs = [TensorSpec((1, 8), torch.float32)] * (p * v)
    x = torch.randn(m, 8, generator=torch.Generator().manual_seed(7))
    pipeline = PipelineExecutor(stages, schedule, nn.functional.mse_loss, specs=specs)
    pipeline.step(x, torch.zeros_like(x))  # first compares the specs of all ranks


@pytest.mark.parametrize("latency_s", [0.0, 0.25])
@pytest.mark.parametrize(
    ("name", "p", "m", "v"),
    [("GPipe", 3, 4, 1), ("1F1B", 2, 5, 1), ("1F1B", 4, 8, 1), ("interleaved", 2, 4, 2)],
)
def test_on_the_emulated_cluster_it_takes_the_time_of_the_simulator(name, p, m, v, latency_s):
    link = Link(bandwidth_bytes_per_s=1e30, latency_s=latency_s)
    cluster = Cluster(
        name="test",
        nodes=1,
        devices_per_node=p,
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=1e12,
        memory_bandwidth_bytes_per_s=1e12,
    )
    plan = ChargePlan((1.0,) * p, (2.0,) * p, b"s" * 16)
    _, timeline = emulate.run(run_charged, p, cluster, name, p, m, v, plan=plan)
    schedule = interleaved(p, m, v) if v > 1 else {"GPipe": gpipe, "1F1B": one_f_one_b}[name](p, m)
    expected = simulate(schedule, StageTimes(p2p_s=latency_s))
    spans = [i for rank in timeline.intervals for i in rank if i.kind == "compute"]
    took_s = max(i.end_s for i in spans) - min(i.start_s for i in spans)
    assert took_s == pytest.approx(expected.makespan_s, abs=1e-9)
    if not latency_s:
        assert 1 - timeline.efficiency == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-9)
