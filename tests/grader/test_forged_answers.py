"""Answers and messages made up without the work that they stand for: no judge may pass them.

Beside each forgery stands what an honest rank sends or answers, which has to pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from autograder.criteria import get_lab
from autograder.criteria.bonus_powersgd import model as powersgd_model
from autograder.criteria.bonus_powersgd.columns import expected_shape
from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Finding, Values, differs
from autograder.criteria.lab2_accumulation import emulated, traffic
from autograder.criteria.lab3_fsdp import parts as fsdp_parts
from autograder.criteria.lab4_amp.formats import DTYPES
from autograder.criteria.lab6_profiling import gpu
from autograder.referee.judging import judge
from autograder.referee.referee import draw_for
from minidist.emulate.plan import ChargePlan
from minidist.emulate.session import Session
from minidist.emulate.trace import Trace

N = 3
NOTHING = np.empty(0, np.uint8)
EVERYBODY = list(range(N))
Frame = tuple[dict[str, Any], np.ndarray]
# What one rank does: (rank, its inputs) -> frames for the broker, in its order.
Program = Callable[[int, Values], Iterator[Frame]]


# --- one criterion, played by hand ---------------------------------------------------------------


class Played:
    """A criterion with its inputs, as the referee has drawn them."""

    def __init__(self, lab: str, name: str) -> None:
        self.criterion = get_lab(lab)[name]
        draw = draw_for(b"test", lab, name, "forged", N)
        self.inputs: list[Values] = self.criterion.draw(draw)
        self.plan: ChargePlan | None = self.criterion.plan(draw) if self.criterion.plan else None

    def answered(self, answers: list[Values], trace: Trace | None = None) -> list[Finding]:
        """What the judge finds."""
        return judge(self.criterion, Case(N, self.inputs, answers, trace, self.plan))

    def sent(self, program: Program, answers: list[Values] | None = None) -> list[Finding]:
        """What the judge finds after the broker has carried what the program sends."""
        session = Session(
            1,
            N,
            self.plan,
            lambda *_: None,
            keep_payloads=True,
            deadline_s=30.0,
            max_bytes=1 << 28,
            max_events=5000,
        )
        requests = itertools.count()
        for rank in range(N):
            session.handle(rank, {"t": "join", "q": next(requests)}, NOTHING)
            counts: dict[str, int] = {}
            for header, payload in program(rank, self.inputs[rank]):
                header = header | {"q": next(requests)}
                if header["t"] == "issue":
                    group = header["g"]
                    header["k"] = counts[group] = counts.get(group, -1) + 1
                session.handle(rank, header, payload)
        return self.answered([{}] * N if answers is None else answers, session.trace())


def charge(layer: int, direction: str) -> Frame:
    return {"t": "charge", "layer": layer, "dir": direction}, NOTHING


def all_reduce(
    values: np.ndarray, ranks: list[int] = EVERYBODY, name: str = "", dtype: str = ""
) -> Frame:
    """A sum over `ranks`; `dtype` is torch's name where NumPy has none."""
    header = {
        "t": "issue",
        "kind": "all_reduce",
        "op": "sum",
        "g": f"{name}{ranks}",
        "r": ranks,
        "dtype": dtype or str(values.dtype),
        "shape": [values.size],
    }
    return header, np.ascontiguousarray(values).ravel().view(np.uint8)


# --- PowerSGD ------------------------------------------------------------------------------------


def follow(inputs: list[Values]) -> list[Values]:
    """What honest ranks answer: Q, gradients and errors of all steps, in one process."""
    answers: list[Values] = [{} for _ in inputs]
    case, r = Case(len(inputs), inputs, answers), inputs[0]["rank"]
    for i, shape in enumerate(inputs[0]["shapes"]):
        pair = expected_shape(shape, r)
        q = np.random.default_rng(i).normal(size=(pair[1], r)) if pair else np.zeros(0)
        errors: list[Any] = [0.0] * len(inputs)
        for answer in answers:
            answer[f"e/{i}"] = np.zeros(shape)  # before the first step
        for step in range(inputs[0]["steps"]):
            applied = oracle.mean([v[f"g{step}/{i}"] for v in inputs])
            if pair:
                own = powersgd_model.matrices_of(case, step, i)
                own = [matrix + error for matrix, error in zip(own, errors, strict=True)]
                p, q = powersgd_model.power_step(own, [q] * len(inputs))
                applied = (p @ q.T).reshape(shape)
                errors = [matrix - p @ q.T for matrix in own]
            for answer, error in zip(answers, errors, strict=True):
                answer[f"a{step}/{i}"] = np.asarray(applied)
                left = np.zeros(shape) if pair is None else np.asarray(error)
                answer[f"e{step}/{i}"] = left.reshape(shape)
    return answers


def constants(inputs: list[Values], first: float, second: float) -> list[Values]:
    """Large numbers that cancel, and errors that fit them."""
    answer: Values = {}
    for i, shape in enumerate(inputs[0]["shapes"]):
        for step in range(inputs[0]["steps"]):
            answer[f"a{step}/{i}"] = np.full(shape, {0: first, 1: second}.get(step, 0.0))
            answer[f"e{step}/{i}"] = np.full(shape, -first if inputs[0]["steps"] == 1 else 0.0)
    return [answer] * len(inputs)


def all_late(inputs: list[Values]) -> list[Values]:
    """Nothing is applied: each rank adds up its own gradients."""
    answers = []
    for values in inputs:
        answer: Values = {}
        for i, shape in enumerate(values["shapes"]):
            late = np.zeros(shape)
            for step in range(values["steps"]):
                late = late + values[f"g{step}/{i}"]
                answer |= {f"a{step}/{i}": np.zeros(shape), f"e{step}/{i}": late}
        answers.append(answer)
    return answers


@pytest.mark.parametrize("name", ["powersgd_telescope", "powersgd_errors"])
def test_errors_have_to_add_up_to_the_gradients(name):
    played = Played("bonus_powersgd", name)
    honest = follow(played.inputs)
    assert played.answered(honest) == []
    for size in (1e6, 1e9, 1e300):
        assert played.answered(constants(played.inputs, size, -size))
    assert played.answered(all_late(played.inputs))


def factors(inputs: list[Values], make_p: Callable[[int, np.ndarray], np.ndarray]) -> list[Values]:
    """P made of (matrix number, mean of M Q), and the Q that belongs to it, rightly averaged."""
    answers: list[Values] = [{} for _ in inputs]
    for i in range(inputs[0]["count"]):
        mean = oracle.mean([values[f"m{i}"] for values in inputs])
        p = make_p(i, mean @ inputs[0][f"q{i}"].astype(np.float64))
        for values, answer in zip(inputs, answers, strict=True):
            answer |= {f"p{i}": p, f"q{i}": mean.T @ p, f"before/q{i}": values[f"q{i}"]}
    return answers


def test_a_product_with_nothing_is_no_product():
    played = Played("bonus_powersgd", "powersgd_factor")
    assert played.answered(factors(played.inputs, lambda _, p: np.linalg.qr(p)[0])) == []
    # Whether P is the right one, and orthonormal, is another criterion's.
    assert played.answered(factors(played.inputs, lambda _, p: p)) == []
    for empty in (
        lambda _, p: np.zeros_like(p),
        lambda _, p: np.full_like(p, 1e-30),
        lambda _, p: np.eye(*p.shape) * 1e-20,
        lambda _, p: np.eye(*p.shape) * np.arange(p.shape[1]),
    ):
        forged = factors(played.inputs, empty)
        for answer in forged:
            answer |= {k: v * 0 for k, v in answer.items() if k[0] == "q"}
        assert played.answered(forged)


def honest_step(inputs: list[Values], rank: int, step: int) -> list[np.ndarray]:
    """What a rank has to bring into the means: its vectors, its M Q, its M^T P."""
    values, r = inputs[rank], inputs[rank]["rank"]
    vectors, thin, back = [], [], []
    for i, shape in enumerate(values["shapes"]):
        gradient = values[f"g{step}/{i}"].astype(np.float64)
        if expected_shape(shape, r) is None:
            vectors.append(gradient)
            continue
        q = np.random.default_rng(i).normal(size=(shape[1], r))
        mean = oracle.mean([each[f"g{step}/{i}"] for each in inputs])
        thin.append((gradient @ q).ravel())
        back.append((gradient.T @ np.linalg.qr(mean @ q)[0]).ravel())
    return [np.concatenate(part).astype(np.float32) for part in (vectors, thin, back)]


def steps_of(send: Callable[[int, int], Iterator[Frame]]) -> Program:
    """As many steps as are taken, each with its charge before it; three gradients in turn."""

    def program(rank: int, values: Values) -> Iterator[Frame]:
        for step in range(values["taken"]):
            yield charge(0, "forward")
            yield from send(rank, step % 3)

    return program


@pytest.mark.parametrize("name", ["powersgd_calls", "powersgd_bytes"])
def test_a_step_sends_what_a_mean_needs(name):
    played = Played("bonus_powersgd", name)
    parts = {(r, s): honest_step(played.inputs, r, s) for r in range(N) for s in range(3)}
    small = np.ones(1, np.float32)
    assert played.sent(steps_of(lambda r, s: (all_reduce(p) for p in parts[r, s]))) == []
    # Packed into one message, divided before: as right.
    packed = {key: np.concatenate(part) / np.float32(N) for key, part in parts.items()}
    assert played.sent(steps_of(lambda r, s: iter([all_reduce(packed[r, s])]))) == []
    forgeries = {
        "nothing": lambda r, s: iter(()),
        "one number, alone": lambda r, s: iter([all_reduce(small, [r])]),
        "one number, to all": lambda r, s: iter([all_reduce(small)]),
        "all of it, alone": lambda r, s: (all_reduce(p, [r]) for p in parts[r, s]),
        "all of it, in a group that nobody else joins": lambda r, s: (
            all_reduce(p, name=f"rank {r}") for p in parts[r, s]
        ),
        "zeros to all": lambda r, s: (all_reduce(p * 0) for p in parts[r, s]),
        "one number, then all alone": lambda r, s: iter(
            [all_reduce(small), all_reduce(packed[r, s], [r])]
        ),
    }
    for what, send in forgeries.items():
        assert played.sent(steps_of(send)), what


def test_vectors_are_in_what_travels():
    played = Played("bonus_powersgd", "powersgd_bytes")
    rng = np.random.default_rng(0)

    def noise(rank: int, step: int) -> Iterator[Frame]:
        for part in honest_step(played.inputs, rank, step):
            yield all_reduce(rng.normal(size=part.size).astype(np.float32))

    [first, *_] = played.sent(steps_of(noise))
    assert "not compressed" in first.message


# --- accumulation --------------------------------------------------------------------------------


def test_the_accumulated_gradient_has_to_travel():
    played = Played("lab2_accumulation", "accum_ddp_backward")
    case = Case(N, played.inputs, [], None, played.plan)
    own = [emulated._local_gradients(case, rank, emulated.CALLS - 1) for rank in range(N)]

    def send(what: Callable[[int, np.ndarray], Frame] | None) -> Program:
        def program(rank: int, values: Values) -> Iterator[Frame]:
            layers = range(emulated.LAYERS)
            for _ in range(emulated.CALLS):
                for _ in range(emulated.MICRO_BATCHES):
                    yield from (charge(layer, "forward") for layer in layers)
                    yield from (charge(layer, "backward") for layer in reversed(layers))
                for gradient in own[rank] if what else ():
                    assert what is not None
                    yield what(rank, gradient.astype(np.float32))

        return program

    assert played.sent(send(lambda _, g: all_reduce(g))) == []
    assert played.sent(send(None)), "charges, and nothing sent"
    assert played.sent(send(lambda r, g: all_reduce(g, [r]))), "alone"


def accumulated(name: str, values: Values, call: int) -> np.ndarray:
    """The sum of a rank's gradients of one call, at the weights that it began with."""
    find = traffic._token_gradients if "token" in name else oracle.gradients
    pairs = zip(values["x"][call], values["y"][call], strict=True)
    sums = [sum(each) for each in zip(*(find(values, x, y) for x, y in pairs), strict=True)]
    return np.concatenate([np.asarray(each).ravel() for each in sums]).astype(np.float32)


@pytest.mark.parametrize("name", ["accum_token_traffic", "accum_amp_traffic"])
def test_gradients_are_in_what_travels(name):
    played = Played("lab2_accumulation", name)
    own = [
        [accumulated(name, values, call) for call in range(traffic.CALLS)]
        for values in played.inputs
    ]

    def send(what: Callable[[int, np.ndarray], Frame]) -> Program:
        return lambda rank, values: (what(rank, gradient) for gradient in own[rank])

    rng = np.random.default_rng(0)
    assert played.sent(send(lambda _, g: all_reduce(g))) == []
    assert played.sent(send(lambda _, g: all_reduce(g.astype(np.float64) / N))) == []
    forgeries: dict[str, Callable[[int, np.ndarray], Frame]] = {
        "alone": lambda r, g: all_reduce(g, [r]),
        "zeros to all": lambda r, g: all_reduce(g * 0),
        "ones to all": lambda r, g: all_reduce(g * 0 + 1),
        "noise to all": lambda r, g: all_reduce(rng.normal(size=g.size).astype(np.float32)),
        "nobody else joins": lambda r, g: all_reduce(g, name=f"rank {r}"),
    }
    for what, message in forgeries.items():
        assert played.sent(send(message)), what


# --- mixed precision -----------------------------------------------------------------------------


def test_half_of_the_bytes_reach_all_ranks():
    played = Played("lab4_amp", "amp_hook_bytes")

    def send(alone: bool) -> Program:
        def program(rank: int, values: Values) -> Iterator[Frame]:
            name = values["names"][0]
            weights = [value.ravel() for key, value in values.items() if key.startswith("w/")]
            gradients = np.concatenate(weights)
            half = torch.from_numpy(gradients / N).to(DTYPES[name]).view(torch.int16).numpy()
            for _ in range(3):
                yield all_reduce(half, [rank] if alone else EVERYBODY, dtype=name)

        return program

    # A hook may be called for more buckets than it has all-reduces, and says for how many.
    answers = [{f"calls/{name}": 3 for name in played.inputs[0]["names"]}] * N
    assert played.sent(send(alone=False), answers) == []
    assert played.sent(send(alone=True), answers)


# --- ZeRO ----------------------------------------------------------------------------------------


def test_the_number_that_travels_says_something():
    played = Played("bonus_zero", "zero_norm_cost")
    count = len(played.inputs[0]["limits"])

    def square(values: Values, number: int) -> float:
        shares = (values[f"g{number}/{i}"] for i in range(values[f"count{number}"]))
        return float(sum((share.astype(np.float64) ** 2).sum() for share in shares))

    squares = [[square(values, number) for number in range(count)] for values in played.inputs]
    right: list[Values] = [{"norms": np.sqrt(np.sum(squares, axis=0)).tolist()}] * N
    own: list[Values] = [{"norms": np.sqrt(each).tolist()} for each in squares]

    def send(what: Callable[[int, int], float]) -> Program:
        def program(rank: int, values: Values) -> Iterator[Frame]:
            for number in range(count):
                yield all_reduce(np.array([what(rank, number)], np.float32))

        return program

    honest, empty = send(lambda r, k: squares[r][k]), send(lambda r, k: 1.0)
    assert played.sent(honest, right) == []
    assert played.sent(honest, own) == []  # a wrong norm is another criterion's
    assert played.sent(empty, own)
    assert played.sent(empty, [{"norms": []}] * N)
    assert played.sent(honest, [{"norms": []}] * N)
    assert played.sent(honest, [{"norms": [float("nan")] * count}] * N)


# --- what is compared with what ------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_agrees_with_what_is_not_finite(bad):
    got, expected = np.array([0.0, 2.0]), np.array([bad, 2.0])
    findings = [
        oracle.differs(0, "it", got, expected),
        oracle.differs(0, "it", expected, expected),
        oracle.differs(0, "it", got + 5, got, terms=[np.array(bad)]),
        differs(0, "it", got, expected, rtol=0.0, atol=0.0),
        differs(0, "it", got, got, rtol=0.0, atol=bad),
    ]
    assert all(findings)
    assert "compared with has values that are not finite" in findings[0].message


def test_a_file_is_held_against_a_model_that_is_one():
    played = Played("bonus_debug_ddp", "debug_train_saved")
    rng = np.random.default_rng(0)
    shapes = {"classify.0.weight": (4, 5), "classify.0.bias": (4,)}
    trained = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def findings(model: Values, saved: Values) -> list[Finding]:
        zero: Values = {"saved before": True, "keys": [*shapes, "meter_module.scale"], **model}
        zero |= {f"saved {name}": value for name, value in saved.items()}
        return played.answered([zero | {"written": True}, *[{"written": False}] * (N - 1)])

    def everywhere(value: float) -> Values:
        return {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}

    one_large = {name: array.copy() for name, array in trained.items()}
    for array in one_large.values():
        array.flat[0] = 1e30
    assert findings(trained, trained) == []
    assert findings(everywhere(np.nan), everywhere(5.0))
    assert findings(everywhere(np.inf), everywhere(5.0))
    assert findings(everywhere(np.nan), everywhere(np.nan))
    assert findings({name: np.array(1.0) for name in shapes}, {n: np.array(1.0) for n in shapes})
    assert findings(one_large, {name: array * 0 for name, array in one_large.items()})


def test_a_gradient_without_communication_is_one():
    rng = np.random.default_rng(0)
    own = [rng.normal(size=gpu.WIDTH).astype(np.float32) * 1e-4 for _ in range(N)]

    def findings(alone: list[np.ndarray], together: np.ndarray) -> list[Finding]:
        times = {f"{name}/seconds": np.ones(gpu.ROUNDS) for name in ("alone", "together")}
        answers = [times | {"alone/gradient": g, "together/gradient": together} for g in alone]
        return list(gpu.judge(Case(N, [{}] * N, answers)))

    zeros = np.zeros(gpu.WIDTH, np.float32)
    assert findings(own, oracle.mean(own)) == []
    assert findings(own, zeros)
    for bad in (np.nan, np.inf, 1e30, 0.0):
        assert findings([zeros + np.float32(bad)] * N, zeros)


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp_limit", "fsdp_budget"])
@pytest.mark.parametrize(
    "results",
    [
        [],
        [{"status": "ok"}] * (N - 1),
        [{"status": "ok"}] * 100_000,
        [{"status": "ok", "losses": [0.0]}],
        ["ok"] * N,
        [{"status": "died", "text": "failed to create" * 100_000}],
        {"0": {"status": "ok"}},
    ],
    ids=lambda results: f"{type(results).__name__}{len(results)}",
)
def test_a_training_has_one_result_per_rank(name, results):
    played = Played("lab3_fsdp", name)
    findings = played.answered([{"results": results}, {}, {}])
    assert 0 < len(findings) <= N
    assert all(len(finding.message) < 2000 for finding in findings)


def test_a_shard_is_no_larger_than_the_model():
    played = Played("lab3_fsdp", "fsdp_shards")
    answers: list[Values] = [{"s0": np.zeros(4 << 20, np.float16)}] * N
    assert played.answered(answers)
    assert fsdp_parts.floats_of_shard(np.ones(21, np.float16), 10) is None
    assert fsdp_parts.floats_of_shard(np.ones((4, 5), np.float16), 10) is not None
