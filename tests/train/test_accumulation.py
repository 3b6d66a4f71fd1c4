"""Gradient accumulation against one backward over the joint batch; collectives are counted."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.launch import run
from minidist.model import GPT, GPTConfig
from minidist.parallel.accumulation import (
    accumulate,
    accumulate_step,
    micro_batch_groups,
    train_epoch_native,
)
from minidist.parallel.data import BucketedDDP

STEPS = 10
VOCABULARY, CONTEXT = 16, 6
CONFIG = GPTConfig(vocab_size=VOCABULARY, context=CONTEXT, width=8, num_layers=1, num_heads=2)


def make_model():
    torch.manual_seed(0)
    return GPT(CONFIG).double()


# Cases whose micro-batches all have as many tokens.
WITHOUT_WEIGHTS = ("equal", "equal, uneven numbers")


def num_micro_batches(case, rank, step):
    """Uneven: other numbers per rank and step, at least one; else a tail group at times."""
    if "uneven" in case:
        return 1 + (rank + step) % 3
    return 1 if step % 4 == 3 else 3


def micro_batch(case, rank, step, i):
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + i)
    tokens = torch.randint(0, VOCABULARY, (2, CONTEXT), generator=generator)
    targets = torch.randint(0, VOCABULARY, (2, CONTEXT), generator=generator)
    if case not in WITHOUT_WEIGHTS:  # padding, of another amount in each
        num_padded = (3 * rank + 5 * i + step) % (2 * CONTEXT + 1)
        targets.view(-1)[:num_padded] = -100
        if rank == 0 and i == num_micro_batches(case, rank, step) - 1 > 0:
            targets[:] = -100  # nothing at all, in the micro-batch that synchronises
    return tokens, targets


def loss_fn(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def num_tokens(batch):
    return int((batch[1] != -100).sum())


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def oracle(case, world_size, max_norm):
    """The mean over all tokens of all ranks and micro-batches, in one backward."""
    model = make_model()
    optimizer = make_optimizer(model)
    losses, norms, counts, gradients = [], [], [], []
    for step in range(STEPS):
        batches = [
            micro_batch(case, rank, step, i)
            for rank in range(world_size)
            for i in range(num_micro_batches(case, rank, step))
        ]
        optimizer.zero_grad()
        tokens, targets = (torch.cat(part) for part in zip(*batches, strict=True))
        loss = loss_fn(model, (tokens, targets))
        loss.backward()
        if max_norm:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        gradients.append(gradient(model))
        optimizer.step()
        losses.append(loss.item())
        counts.append(num_tokens((tokens, targets)))
    return losses, norms, counts, gradients, {n: p.detach() for n, p in model.named_parameters()}


class Counter:
    """An all-reduce that counts."""

    def __init__(self):
        self.num = 0

    def __call__(self, flat):
        self.num += 1
        return dist.all_reduce(flat, async_op=True)


class CountingScaler:
    """A scaler of our own, with torch's methods."""

    def __init__(self):
        self.calls = []

    def scale(self, loss):
        self.calls.append("scale")
        return loss * 1024

    def unscale_(self, optimizer):
        self.calls.append("unscale_")
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad /= 1024
        self.unscaled = True

    def step(self, optimizer):
        self.calls.append("step")
        if not getattr(self, "unscaled", False):
            self.unscale_(optimizer)
        self.unscaled = False
        optimizer.step()

    def update(self):
        self.calls.append("update")


def train(case, how, max_norm):
    rank, n = dist.get_rank(), dist.get_world_size()
    model = make_model()
    counter = Counter()
    if how == "stock":
        ddp = nn.parallel.DistributedDataParallel(model)

        def hook(state, bucket):
            counter.num += 1
            return (
                dist.all_reduce(bucket.buffer(), async_op=True)
                .get_future()
                .then(lambda f: f.value()[0] / n)
            )

        ddp.register_comm_hook(None, hook)
    else:
        ddp = BucketedDDP(model, reduce=counter, reorder=False)
    optimizer = make_optimizer(model)
    scaler = None
    if how == "torch scaler":
        scaler = torch.amp.GradScaler("cpu")
    if how == "own scaler":
        scaler = CountingScaler()
    losses, norms, totals, gradients = [], [], [], []
    for step in range(STEPS):
        batches = [
            micro_batch(case, rank, step, i) for i in range(num_micro_batches(case, rank, step))
        ]
        done = accumulate_step(
            ddp,
            batches,
            loss_fn,
            optimizer,
            weights=None if case in WITHOUT_WEIGHTS else [num_tokens(b) for b in batches],
            scaler=scaler,
            autocast=lambda: torch.autocast("cpu", enabled=False),
            max_norm=max_norm,
        )
        mean = done.loss.clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / n)
        norms.append(done.grad_norm)
        totals.append(done.total_weight)
        gradients.append(gradient(model))
    num_buckets = 1 if how == "stock" else len(ddp.buckets)
    calls = scaler.calls if isinstance(scaler, CountingScaler) else None
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return losses, norms, totals, gradients, parameters, counter.num / num_buckets, calls


CASES = {
    "equal": ("equal", "ours", None),
    "equal, clipped": ("equal", "ours", 0.05),
    "equal, stock DDP": ("equal", "stock", None),
    "equal, uneven numbers": ("equal, uneven numbers", "ours", None),
    "padded": ("padded", "ours", None),
    "padded, clipped, torch's scaler": ("padded", "torch scaler", 0.05),
    "padded, own scaler": ("padded", "own scaler", None),
    "uneven, clipped, own scaler": ("uneven", "own scaler", 0.05),
    "uneven, stock DDP": ("uneven", "stock", None),
}


def train_all():
    dist.init_process_group("gloo")
    results = {name: train(*case) for name, case in CASES.items()}
    results["native"] = native_epoch()
    results["errors"] = wrong_calls()
    dist.barrier()
    dist.destroy_process_group()
    return results


def wrong_calls():
    rank = dist.get_rank()
    model = BucketedDDP(make_model())
    optimizer = make_optimizer(model)
    step = partial(accumulate_step, model, loss_fn=loss_fn, optimizer=optimizer)
    one = micro_batch("equal", rank, 0, 0)
    texts = []
    for batches, weights in (
        ([], None),
        ([one] if rank > 0 else [], None),
        ([one] if rank > 0 else [], [1.0] if rank > 0 else []),  # a rank without data
        ([one], [1.0, 2.0] if rank == 0 else [1.0]),
        ([one], [0.0]),
        ([one], [-1.0]),
    ):
        with pytest.raises(ValueError, match="accumulate_step: ") as caught:
            step(batches, weights=weights)
        texts.append(str(caught.value))
        assert f"rank {rank} of {dist.get_world_size()} has " in texts[-1]
    return texts


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_steps_equal_one_process_that_sees_all_tokens(world_size):
    ranks = run(train_all, world_size, deadline_s=120)
    for name, (case, how, max_norm) in CASES.items():
        losses, norms, counts, gradients, parameters = oracle(case, world_size, max_norm)
        for rank, results in enumerate(ranks):
            what = f"{name}, rank {rank}"
            got_losses, got_norms, totals, got_gradients, got, num_reductions, calls = results[name]
            assert got_losses == pytest.approx(losses, rel=1e-9), what
            if case in WITHOUT_WEIGHTS:
                everyone = range(world_size)
                counts = [
                    sum(num_micro_batches(case, r, s) for r in everyone) for s in range(STEPS)
                ]
            assert totals == counts, what
            if max_norm:
                torch.testing.assert_close(torch.stack(got_norms), torch.stack(norms))
            for step, (ours, whole) in enumerate(zip(got_gradients, gradients, strict=True)):
                torch.testing.assert_close(
                    ours,
                    whole,
                    rtol=1e-8,
                    atol=1e-10,
                    msg=lambda m, w=what, s=step: f"{w}, gradient of step {s}: {m}",
                )
            for key, value in parameters.items():
                torch.testing.assert_close(
                    got[key],
                    value,
                    rtol=1e-8,
                    atol=1e-9,
                    msg=lambda m, w=what, k=key: f"{w}, {k}: {m}",
                )
            # One reduction of the gradients per step, however many micro-batches.
            assert num_reductions == STEPS, what
            if how == "own scaler":
                num = sum(num_micro_batches(case, rank, s) for s in range(STEPS))
                assert calls.count("scale") == num
                assert calls.count("unscale_") == calls.count("step") == STEPS
                assert calls[-3:] == (
                    ["unscale_", "step", "update"] if max_norm else ["step", "unscale_", "update"]
                )
    expected = one_epoch(world_size)
    for results in ranks:
        for how, parameters in results["native"].items():
            torch.testing.assert_close(
                parameters, expected, rtol=1e-8, atol=1e-9, msg=lambda m, h=how: f"{h}: {m}"
            )
        texts = results["errors"]
        assert f"{world_size} ranks have no micro-batches" in texts[0]
        assert "1 ranks have no micro-batches" in texts[1]
        assert "1 ranks have no micro-batches" in texts[2]
        assert "1 ranks" in texts[3]
        assert "add up to 0" in texts[4]
        assert f"{world_size} ranks" in texts[5]


# 28 micro-batches in groups of three: ten steps, the last with one.
NUM_MICRO_BATCHES, GROUP = 28, 3


def epoch_data(rank):
    """The last batch has one sample instead of two, and on rank 0 so has the first."""
    data = [micro_batch("equal", rank, 0, i) for i in range(NUM_MICRO_BATCHES)]
    for i in (0, -1) if rank == 0 else (-1,):
        data[i] = tuple(part[:1] for part in data[i])
    return data


def native_epoch():
    """Torch's own loop beside ours, on stock DDP."""
    data = epoch_data(dist.get_rank())
    loss = lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())  # noqa: E731
    results = {}
    for how in ("native", "ours"):
        model = make_model()
        ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = make_optimizer(model)
        if how == "native":
            num_steps = train_epoch_native(ddp, data, loss, optimizer, GROUP)
        else:
            groups = list(micro_batch_groups(data, GROUP))
            for group in groups:
                weights = [len(targets) for _, targets in group]
                accumulate_step(ddp, group, loss_fn, optimizer, weights=weights)
            num_steps = len(groups)
        assert num_steps == STEPS
        results[how] = torch.cat([p.detach().flatten() for p in model.parameters()])
    return results


def one_epoch(world_size):
    """The same epoch in one process: one backward over what all ranks see in a step."""
    model = make_model()
    optimizer = make_optimizer(model)
    for start in range(0, NUM_MICRO_BATCHES, GROUP):
        batches = [
            each for rank in range(world_size) for each in epoch_data(rank)[start : start + GROUP]
        ]
        optimizer.zero_grad()
        tokens, targets = (torch.cat(part) for part in zip(*batches, strict=True))
        loss_fn(model, (tokens, targets)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Plain(nn.Module):
    """Writes down under which mode its forwards ran."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.sync = True
        self.seen = []

    @contextlib.contextmanager
    def no_sync(self):
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def forward(self, x):
        self.seen.append(self.sync)
        return self.layer(x)


def test_the_loop_is_under_no_sync_until_the_last():
    model = Plain()
    modes = []
    for x, is_last in accumulate((torch.full((1, 1), float(i)) for i in range(4)), model):
        loss = model(x).sum() / 4
        modes.append((model.sync, is_last))  # backward is inside as well
        loss.backward()
    assert modes == [(False, False)] * 3 + [(True, True)]
    assert model.seen == [False] * 3 + [True]
    assert model.layer.weight.grad.item() == 1.5
    assert list(accumulate([], model)) == []
    stepped = accumulate(range(3), model)
    assert next(stepped) == (0, False)
    assert not model.sync
    with pytest.warns(UserWarning, match="micro-batch 0"):
        stepped.close()
    assert model.sync
    # A module without no_sync.
    assert [last for _, last in accumulate(range(3), nn.Linear(1, 1))] == [False, False, True]


@pytest.mark.parametrize("leaves", ["break", "exception"])
@pytest.mark.parametrize("number", [0, 1])
def test_leaving_the_loop_early_ends_no_sync_and_says_what_the_gradients_are(leaves, number):
    model = Plain()
    kept = accumulate(range(3), model)  # a variable that lives on

    def loop():
        for i, _ in kept:
            if i == number and leaves == "exception":
                raise KeyError("own")
            if i == number:
                return

    expected = pytest.raises(KeyError) if leaves == "exception" else contextlib.nullcontext()
    message = rf"ended at micro-batch {number}.*this process alone"
    with expected as caught, pytest.warns(UserWarning, match=message):
        loop()
    assert caught is None or caught.tb is not None  # it holds the frame of the loop
    assert model.sync
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, _ in accumulate(range(3), model):
            if i == 2:
                break  # the last one has synchronised
        for _ in accumulate(range(3), nn.Linear(1, 1)):
            break  # nothing was kept local


def test_groups_keep_the_tail():
    assert list(micro_batch_groups(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(micro_batch_groups([], 3)) == []
    assert list(micro_batch_groups(range(2), 5)) == [[0, 1]]
    with pytest.raises(ValueError, match="got 0"):
        micro_batch_groups([], 0)


def test_fp16_overflow_skips_the_step_and_the_next_one_recovers():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    batches = [torch.full((1, 1), 1e3)] * 2
    fn = lambda m, x: m(x).mean()  # noqa: E731
    accumulate_step(model, batches, fn, optimizer, scaler=scaler, max_norm=1.0)
    assert model.weight.item() == 1.0
    assert scaler.get_scale() == pytest.approx(5e37)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accumulate_step(model, batches, fn, optimizer, scaler=scaler, max_norm=1.0)
    assert model.weight.item() == pytest.approx(0.9)


def test_micro_batches_may_come_one_by_one():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = [torch.full((1, 2), float(i)) for i in range(3)]
    steps = [
        accumulate_step(model, some, lambda m, x: m(x).mean(), optimizer)
        for some in (batches, iter(batches), (batch for batch in batches))
    ]
    assert len({step.loss.item() for step in steps}) == 1
    assert {step.total_weight for step in steps} == {3.0}
