"""Ways of training side by side: the numbers are those that one can compute."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from minidist import beside as module
from minidist.beside import BATCH, LAYERS, WIDTH, beside, find, training
from minidist.launch import run
from minidist.parallel.data import BucketedDDP
from minidist.parallel.zero import Zero3

BUFFER = LAYERS * (WIDTH + 1) * WIDTH * 4  # bytes of all parameters


class Summing:
    """A wrong DDP: it adds the ranks' gradients up."""

    def __init__(self, net) -> None:
        self.net = net

    def __call__(self, x):
        return self.net(x)

    def finish_gradient_synchronization(self) -> None:
        for p in self.net.parameters():
            dist.all_reduce(p.grad)


def sharded(net):
    Zero3(net, list(net))
    return net


def compare():
    dist.init_process_group("gloo")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        results = beside(
            {
                "torch": training(DistributedDataParallel),
                "minidist": training(BucketedDDP),
                "sharded": training(sharded),
                "wrong": training(Summing),
                "later": None,
            },
            steps=3,
            rounds=2,
        )
    return results, said.getvalue()


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def test_losses_bytes_and_times(world_size):
    ranks = run(compare, world_size, deadline_s=240)
    results, said = ranks[0]
    assert [text for _, text in ranks[1:]] == [""] * (world_size - 1)
    assert "later: handed out when this lab is over" in said
    right = results["torch"].losses
    for name in ("minidist", "sharded"):
        assert results[name].losses == pytest.approx(right, rel=1e-5)
    gap = abs(results["wrong"].losses[-1] - right[-1])
    assert (gap > 1e-2) == (world_size > 1)
    ring = 2 * (world_size - 1) / world_size * BUFFER / 1e6
    assert results["torch"].megabytes == pytest.approx(ring, rel=1e-3)
    assert results["sharded"].megabytes == pytest.approx(1.5 * ring, rel=0.08)
    assert results["wrong"].calls == 2 * LAYERS
    compute = LAYERS * (module.FORWARD_S + module.BACKWARD_S) * 1e3
    network = ring * 1e6 / module.NETWORK.bandwidth_bytes_per_s * 1e3
    for result in results.values():
        assert result.ms > 0
        assert result.emulated_ms >= compute - 1e-9
    # After backward, nothing hides what the network takes.
    latency = 2 * LAYERS * 2 * (world_size - 1) * module.NETWORK.latency_s * 1e3
    assert results["wrong"].emulated_ms == pytest.approx(compute + network + latency, rel=1e-6)
    if world_size > 1:
        assert results["minidist"].emulated_ms < results["wrong"].emulated_ms


def compare_places():
    dist.init_process_group("gloo")
    ways = {"blocking": training(Summing)}
    with pytest.raises(ValueError, match="to divide 2 ranks, got 3"):
        beside(ways, ranks_per_node=3)
    return [beside(ways, steps=1, rounds=1, ranks_per_node=n)["blocking"] for n in (1, 2)]


def test_links_within_a_node_are_faster():
    apart, together = run(compare_places, 2, deadline_s=240)[0]
    computing = LAYERS * (module.FORWARD_S + module.BACKWARD_S) * 1e3
    assert apart.emulated_ms - computing == pytest.approx(10 * (together.emulated_ms - computing))


def test_what_is_not_handed_out_is_none():
    assert find("minidist.parallel.data:BucketedDDP") is BucketedDDP
    assert find("minidist.nothing.of_it:Thing") is None
    with pytest.raises(ValueError, match="at least one way"):
        beside({"later": None})


def test_the_batches_are_those_of_the_ranks():
    x, y = module._batches(1, 2)
    assert x.shape == y.shape == (2, BATCH, WIDTH)
    assert not x.equal(module._batches(0, 2)[0])
