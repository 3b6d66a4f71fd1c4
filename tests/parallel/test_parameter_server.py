"""The parameter server: rules, simulation and real processes against plain SGD and each other."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.errors import LaunchError, ProtocolError
from minidist.launch import run
from minidist.parallel.parameter_server import (
    Asynchronous,
    Server,
    Synchronous,
    replay,
    serve,
    simulate,
    work,
)

SIZE = 6


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=0.05, momentum=0.5)


def sample(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(4, SIZE, generator=generator, dtype=torch.float64)
    return x, x @ torch.arange(1.0, SIZE + 1, dtype=torch.float64)


def gradient(parameters: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    """Of a least-squares problem, on data of this worker and step."""
    x, y = sample(worker, step)
    return x.T @ (x @ parameters - y) / len(y)


def start() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.float64)


def distance(parameters: torch.Tensor) -> float:
    return (parameters - torch.arange(1.0, SIZE + 1, dtype=torch.float64)).norm().item()


def big_batch(num_workers: int, num_updates: int) -> torch.Tensor:
    """The oracle of synchronous training: one process, all workers' data in each step."""
    parameters = start()
    optimizer = sgd([parameters])
    for step in range(num_updates):
        parameters.grad = torch.stack(
            [gradient(parameters, worker, step) for worker in range(num_workers)]
        ).mean(0)
        optimizer.step()
    return parameters


# ------------------------------------------------------------------ rules


def test_a_worker_waits_for_those_it_must_wait_for():
    ones = torch.ones(3)
    server = Server(torch.zeros(3), sgd, 3, Synchronous())
    assert server.push(2, ones) == []
    assert server.push(0, ones) == []
    assert server.parameters.count_nonzero() == 0
    assert server.push(1, ones) == [0, 1, 2]
    assert server.parameters.tolist() == pytest.approx([-0.05] * 3)
    assert server.report.histogram() == [(0, 3)]

    # A backup worker: the third is late, its gradient is thrown away, and it goes on at once.
    server = Server(torch.zeros(3), sgd, 3, Synchronous(num_backups=1))
    assert server.push(2, ones) == []
    assert server.push(0, ones) == [0, 2]
    assert server.push(0, ones) == []
    assert server.push(1, 100 * ones) == [1]
    assert server.report.num_dropped == 1
    assert server.parameters.tolist() == pytest.approx([-0.05] * 3)
    assert server.push(1, ones) == [0, 1]
    assert server.push(2, ones) == [2]
    assert server.report.num_applied == 4

    server = Server(torch.zeros(3), sgd, 2, Asynchronous())
    assert [server.push(0, ones) for _ in range(4)] == [[0]] * 4
    assert server.push(1, ones) == [1]
    assert server.report.histogram() == [(0, 4), (1, 0), (2, 0), (3, 0), (4, 1)]
    assert server.report.mean_staleness == 0.8
    assert server.report.arrivals == [0, 0, 0, 0, 1]

    server = Server(torch.zeros(3), sgd, 2, Asynchronous(max_ahead=1))
    assert server.push(0, ones) == [0]
    assert server.push(0, ones) == []
    assert server.report.num_updates == 2  # applied, though it waits
    assert server.push(1, ones) == [0, 1]

    with pytest.raises(ValueError, match="worker 0 sent a gradient of shape"):
        server.push(0, torch.ones(2))
    server.push(0, ones)
    with pytest.raises(ValueError, match="worker 0 has no parameters out"):
        server.push(0, ones)
    with pytest.raises(ValueError, match="worker 7 has no parameters out"):
        server.push(7, ones)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.zeros(2, 2), sgd, 1, Asynchronous()), "1-D floating-point"),
        ((torch.zeros(2, dtype=torch.int64), sgd, 1, Asynchronous()), "1-D floating-point"),
        ((torch.zeros(2), sgd, 0, Asynchronous()), "at least 1 worker"),
        ((torch.zeros(2), sgd, 2, Synchronous(num_backups=2)), "num_backups must be in"),
        ((torch.zeros(2), sgd, 2, Asynchronous(max_ahead=-1)), "max_ahead must not be"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        Server(*arguments)


# ------------------------------------------------------------------ simulation


def test_synchronous_training_is_large_batch_training_whatever_the_order():
    for num_workers in (1, 2, 3, 5):
        expected = big_batch(num_workers, 20)
        for seed in (0, 1):
            got = simulate(
                gradient,
                start(),
                sgd,
                num_workers=num_workers,
                num_updates=20,
                consistency=Synchronous(),
                seed=seed,
            )
            assert torch.equal(got.parameters, expected)
            assert got.report.histogram() == [(0, 20 * num_workers)]
    # One worker never misses anything.
    alone = simulate(
        gradient, start(), sgd, num_workers=1, num_updates=20, consistency=Asynchronous()
    )
    assert torch.equal(alone.parameters, big_batch(1, 20))


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(
    num_workers=st.integers(1, 6),
    max_ahead=st.one_of(st.none(), st.integers(0, 4)),
    seed=st.integers(0, 1000),
    slow=st.floats(1.0, 20.0),
)
def test_staleness_is_bounded_and_a_run_can_be_repeated(num_workers, max_ahead, seed, slow):
    def compute_s(worker: int, step: int, rng: random.Random) -> float:
        return rng.expovariate(1.0) + 1e-9 if worker else slow * rng.uniform(0.5, 1.5)

    consistency = Asynchronous(max_ahead=max_ahead)
    runs = [
        simulate(
            gradient,
            start(),
            sgd,
            num_workers=num_workers,
            num_updates=60,
            consistency=consistency,
            compute_s=compute_s,
            seed=seed,
        )
        for _ in range(2)
    ]
    first = runs[0]
    assert torch.equal(first.parameters, runs[1].parameters)
    assert first.intervals == runs[1].intervals
    assert first.report == runs[1].report
    assert first.report.num_applied == first.report.num_updates == 60
    again, report = replay(
        gradient,
        start(),
        sgd,
        num_workers=num_workers,
        arrivals=first.report.arrivals,
        consistency=consistency,
    )
    assert torch.equal(again, first.parameters)
    assert report == first.report
    if max_ahead is None:
        assert first.idle_share == 0.0
    else:
        assert max(first.report.staleness) <= (num_workers - 1) * (2 * max_ahead + 1)
        counts = [0] * num_workers
        for worker in first.report.arrivals:
            counts[worker] += 1
            assert max(counts) - min(counts) <= max_ahead + 1


def test_waiting_is_traded_for_staleness():
    """One of 4 workers is 4 times slower. All figures are exact: the clock is virtual."""

    def compute_s(worker: int, step: int, rng: random.Random) -> float:
        return 4.0 if worker == 0 else 1.0

    def at(consistency, num_updates):
        return simulate(
            gradient,
            start(),
            sgd,
            num_workers=4,
            num_updates=num_updates,
            consistency=consistency,
            compute_s=compute_s,
            evaluate=distance,
        )

    # Synchronous: every step takes as long as the slowest. 10 steps, 40 gradients.
    sync = at(Synchronous(), 10)
    assert sync.time_s == 40.0
    assert sync.idle_share == pytest.approx(3 * 3 / (4 * 4))
    # One backup worker: as fast as the others. 30 gradients.
    backup = at(Synchronous(num_backups=1), 10)
    assert backup.time_s == 10.0
    assert backup.report.num_applied == 30
    assert backup.report.num_dropped == 2
    # Asynchronous: 13 gradients per 4 seconds, none of them waits; they are stale.
    asynchronous = at(Asynchronous(), 39)
    assert asynchronous.time_s == 12.0
    assert asynchronous.idle_share == 0.0
    assert asynchronous.report.staleness[0] < 10
    assert max(asynchronous.report.staleness) == 12  # the slow one's, each time
    assert asynchronous.report.staleness[12] == 3 - 1
    # Stale synchronous lies between.
    bounded = at(Asynchronous(max_ahead=1), 40)
    assert 12.0 < bounded.time_s <= 40.0
    assert bounded.report.mean_staleness <= asynchronous.report.mean_staleness
    # Each approaches the solution; values come with the virtual time.
    for result in (sync, backup, asynchronous, bounded):
        assert result.values[-1][1] < 0.6 * distance(start())
        assert result.values[-1][0] == result.time_s


def test_too_much_staleness_breaks_what_works_without():
    """A step size at which the synchronous run converges and 15 steps of delay diverge."""

    def ill(parameters, worker, step):
        return parameters - 1.0

    def plain(tensors):
        return torch.optim.SGD(tensors, lr=0.5)

    def at(consistency, num_workers):
        return simulate(
            ill,
            start(),
            plain,
            num_workers=num_workers,
            num_updates=200,
            consistency=consistency,
            compute_s=lambda worker, step, rng: 1.0,
        )

    assert (at(Synchronous(), 16).parameters - 1).abs().max() < 1e-9
    delayed = at(Asynchronous(), 16)
    assert (delayed.parameters - 1).abs().max() > 1e3
    assert delayed.report.histogram()[-1][0] == 15
    with pytest.raises(ValueError, match="must be positive"):
        simulate(
            ill,
            start(),
            plain,
            num_workers=1,
            num_updates=1,
            consistency=Asynchronous(),
            compute_s=lambda worker, step, rng: 0.0,
        )


# ------------------------------------------------------------------ real processes

MODES = [
    Synchronous(),
    Asynchronous(),
    Asynchronous(max_ahead=0),
    Asynchronous(max_ahead=2),
]


def real_servers():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    modes = [*MODES, Synchronous(num_backups=1)] if n > 2 else MODES
    results = []
    for consistency in modes:
        if rank == 0:
            results.append(serve(start(), sgd, num_updates=25, consistency=consistency))
        else:
            results.append((work(gradient, start()), None))
    # In a group that does not begin at rank 0.
    if n > 2:
        group: Any = dist.new_group([1, 2])
        if rank == 1:
            results.append(
                serve(start(), sgd, num_updates=5, consistency=Asynchronous(), group=group)
            )
        if rank == 2:
            results.append((work(gradient, start(), group=group), None))
    # The wrong rank; before any message.
    if rank == 0:
        with pytest.raises(ValueError, match="on rank 0"):
            work(gradient, start())
    else:
        with pytest.raises(ValueError, match=f"on rank {rank}"):
            serve(start(), sgd, num_updates=1, consistency=Asynchronous())
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_real_processes_do_what_the_simulation_says(world_size):
    results = run(real_servers, world_size)
    num_workers = world_size - 1
    modes = [*MODES, Synchronous(num_backups=1)] if world_size > 2 else MODES
    for number, consistency in enumerate(modes):
        parameters, report = results[0][number]
        for rank in range(1, world_size):
            assert torch.equal(results[rank][number][0], parameters)
        assert report.num_updates == 25
        if consistency == Synchronous():
            assert torch.equal(parameters, big_batch(num_workers, 25))
        # Whatever order the gradients came in: the same order in one process is the same run.
        again, report_again = replay(
            gradient,
            start(),
            sgd,
            num_workers=num_workers,
            arrivals=report.arrivals,
            consistency=consistency,
        )
        assert torch.equal(again, parameters)
        assert report_again == report
        if isinstance(consistency, Asynchronous):
            assert report.num_applied == 25
            if consistency.max_ahead is not None:
                bound = (num_workers - 1) * (2 * consistency.max_ahead + 1)
                assert max(report.staleness) <= bound
        assert distance(parameters) < distance(start())
    if world_size > 2:
        assert torch.equal(results[1][-1][0], results[2][-1][0])


def failing_worker(consistency):
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def bad(parameters, worker, step):
        if worker == 1 and step == 2:
            raise ZeroDivisionError("on purpose")
        return gradient(parameters, worker, step)

    try:
        if rank == 0:
            serve(start(), sgd, num_updates=1000, consistency=consistency)
        else:
            work(bad, start())
        outcome = "finished"
    except (ProtocolError, ZeroDivisionError) as error:
        outcome = f"{type(error).__name__}: {error}"
    dist.barrier()
    dist.destroy_process_group()
    return outcome


@pytest.mark.parametrize("consistency", [Synchronous(), Asynchronous(max_ahead=1)])
def test_a_worker_that_raises_ends_all_ranks(consistency):
    outcomes = run(failing_worker, 4, consistency)
    assert outcomes[0] == "ProtocolError: [rank 2] serve: worker 1 raised"
    assert outcomes[2] == "ZeroDivisionError: on purpose"
    assert (
        outcomes[1] == "ProtocolError: [rank 1] work: another rank of the parameter server failed"
    )
    assert outcomes[3].startswith("ProtocolError: [rank 3]")


def wrong_shape():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        serve(start(), sgd, num_updates=3, consistency=Asynchronous())
    work(lambda parameters, worker, step: parameters[:2], start())


def alone():
    dist.init_process_group("gloo")
    serve(start(), sgd, num_updates=3, consistency=Asynchronous())


@pytest.mark.usefixtures("patient")
def test_wrong_use_of_real_processes():
    with pytest.raises(LaunchError, match=r"shape \(2,\) on rank 1, expected \(6,\)"):
        run(wrong_shape, 2)
    with pytest.raises(LaunchError, match="needs a server and a worker"):
        run(alone, 1)
