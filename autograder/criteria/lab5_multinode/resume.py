"""Criteria for task 4 of lab 5: everything that decides the next step is in the checkpoint.

Each criterion continues the training after the state was collected (the run without a break). It
also restores the state into a fresh training, which then continues (the resumed run). Both runs
must agree bit for bit, and the run without a break must equal what one trusted process computes.
Each criterion checks only its own part of the state and ignores whether other parts are restored.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import described, is_floats, item_of, plain
from autograder.criteria.common.resumed import load_plain, own_random_numbers, saved
from autograder.criteria.common.virtual_gpu import GpuGenerator, VirtualGpus
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs

SIZES = (5, 7, 2)
BATCH, BEFORE, AFTER = 6, 4, 7
RTOL = 1e-7


class Positions:
    """A stand-in for the lab's sampler, with `epoch`, `position` and `take`."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed = num_samples, seed
        self.epoch, self.position = 0, 0

    def take(self, count: int) -> list[int]:
        """The next `count` indices; after the end of an epoch the next epoch begins."""
        taken: list[int] = []
        for _ in range(count):
            if self.position == self.num_samples:
                self.epoch, self.position = self.epoch + 1, 0
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_samples)
            taken.append(int(order[self.position]))
            self.position += 1
        return taken


@dataclass
class Training:
    """A stand-in for the lab's `Training`, with the same fields."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    sampler: Any
    step: int = 0


def _training(arrays: Values, settings: Values, device: torch.device) -> Training:
    model = oracle.mlp(arrays, torch.float64)
    # BatchNorm has buffers. It must not directly follow the first layer: the gradient of that
    # layer's bias would be only rounding noise, which Adam would amplify.
    model.insert(2, nn.BatchNorm1d(SIZES[1], dtype=torch.float64))
    model = model.to(device)
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings["lr"], weight_decay=0.1)
    schedules = torch.optim.lr_scheduler
    warmup = settings["warmup"]  # two schedules, each with a state of its own
    rising = schedules.LinearLR(optimizer, start_factor=0.2, total_iters=warmup)
    falling = schedules.ExponentialLR(optimizer, gamma=0.9)
    scheduler = schedules.SequentialLR(optimizer, [rising, falling], milestones=[warmup])
    return Training(model, optimizer, scheduler, Positions(11, settings["seed"]))


def _change_decay(training: Training, settings: Values) -> None:
    """Changes an option of an optimizer that exists: the new value belongs to the state, too."""
    training.optimizer.param_groups[0]["weight_decay"] = settings["later_decay"]


def _run(training: Training, x: torch.Tensor, y: torch.Tensor, steps: int) -> list[float]:
    """Trains `steps` steps, each on the rows of its step number; the losses.

    The schedule pauses in every third step, so the step number does not give its state.
    """
    losses = []
    for _ in range(steps):
        rows = slice(training.step * BATCH, (training.step + 1) * BATCH)
        training.optimizer.zero_grad()
        loss = oracle.mse(training.model(x[rows]), y[rows])
        loss.backward()
        training.optimizer.step()
        if training.step % 3 != 1:
            training.scheduler.step()
        training.step += 1
        losses.append(loss.item())
    return losses


def _through_a_file(state: Any, context: Context, *, strict: bool) -> Any:
    """Rank 0's state, saved by rank 0 and loaded by all ranks.

    Raises:
        TypeError: with `strict`, if the state holds more than tensors and plain values.
    """
    data: list[Any] = [saved(state) if context.rank == 0 else None]
    dist.broadcast_object_list(data, src=0)
    if strict:
        return load_plain(data[0], "the state")
    return torch.load(io.BytesIO(data[0]), map_location="cpu", weights_only=False)


def _hand(model: nn.Module) -> list[torch.Tensor]:
    """A model's gradients and train/eval modes, which are not in its state_dict."""
    nothing = torch.zeros(0)
    grads = [(nothing if p.grad is None else p.grad).clone() for p in model.parameters()]
    return [*grads, torch.tensor([m.training for m in model.modules()])]


def _settings(rng: np.random.Generator) -> Values:
    return {
        "lr": float(rng.uniform(0.02, 0.1)),
        "warmup": int(rng.integers(5, 7)),  # both schedules have steps after the break
        "later_decay": float(rng.uniform(0.2, 0.5)),
        "seed": int(rng.integers(2**31)),
    }


# --- resume_training: model, optimizer, schedule -------------------------------------------------


def draw_training(draw: Draw) -> list[Values]:
    """One training, the same on all ranks as in data parallelism, and weights for a fresh one."""
    rng = draw.shared()
    inputs = oracle.draw_parameters(rng, SIZES)
    inputs |= {f"fresh{k}": v for k, v in oracle.draw_parameters(rng, SIZES).items()}
    inputs |= oracle.draw_batch(rng, BATCH * (BEFORE + AFTER), SIZES)
    inputs["settings"] = _settings(rng)
    return [dict(inputs) for _ in range(draw.world_size)]


def observe_training(functions: Any, inputs: Values, context: Context) -> Values:
    """Losses, learning rates and final model tensors, with and without a break."""
    collect_state, restore_state = functions
    x, y = (torch.from_numpy(inputs[k]).double().to(context.device) for k in "xy")
    with own_random_numbers():
        one = _training(inputs, inputs["settings"], context.device)
        _change_decay(one, inputs["settings"])
        _run(one, x, y, BEFORE)
        before = _hand(one.model)
        state = _through_a_file(collect_state(one), context, strict=False)
        kept = all(torch.equal(a, b) for a, b in zip(before, _hand(one.model), strict=True))
        fresh = {k.removeprefix("fresh"): v for k, v in inputs.items() if k.startswith("fresh")}
        two = _training(fresh, inputs["settings"], context.device)
        restore_state(two, state)
        held = {id(p) for group in two.optimizer.param_groups for p in group["params"]}
        answer: Values = {"kept": kept, "held": held >= {id(p) for p in two.model.parameters()}}
        for name, training in (("whole", one), ("resumed", two)):
            training.step = BEFORE  # only resume_sampler checks that step is restored
            answer[f"lr/{name}"] = np.array([g["lr"] for g in training.optimizer.param_groups])
            answer[f"losses/{name}"] = np.array(_run(training, x, y, AFTER))
            tensors = [*training.model.parameters(), *training.model.buffers()]
            for i, tensor in enumerate(tensors):
                answer[f"{i}/{name}"] = tensor.detach().double().cpu().numpy()
        return answer


OTHER_PARAMETERS = (
    "After restore_state the model's parameters are other objects than those that the optimizer "
    "changes. Copy the numbers into the parameters that are there, as load_state_dict without "
    "assign=True does."
)


def judge_training(case: Case) -> Iterator[Finding]:
    """The resumed run equals the run without a break, and both equal the oracle's run.

    Names in the state are free.
    """
    given = case.inputs[0]
    x, y = (torch.from_numpy(given[k]).double() for k in "xy")
    right = _training(given, given["settings"], torch.device("cpu"))
    _change_decay(right, given["settings"])
    _run(right, x, y, BEFORE)
    lr = np.array([group["lr"] for group in right.optimizer.param_groups])
    losses = np.array(_run(right, x, y, AFTER))
    tensors = [
        t.detach().double().numpy() for t in [*right.model.parameters(), *right.model.buffers()]
    ]
    for rank, answer in enumerate(case.answers):
        if wrong := _differs(
            rank,
            "losses after collect_state, without a break",
            answer.get("losses/whole"),
            losses,
            hint="collect_state must not change the training.",
        ):
            yield wrong
            continue
        if answer.get("kept") is not True:
            yield Finding(
                "after collect_state the model has different gradients, or is in a different mode "
                "(train or eval) than before: collect_state must not change the training.",
                rank,
            )
            continue
        got, kept = answer.get("losses/resumed"), answer.get("losses/whole")
        what = f"losses of steps {BEFORE} to {BEFORE + AFTER - 1} after restore_state"
        hint = OTHER_PARAMETERS
        if answer.get("held") is not False:
            hint = _hint(got, losses, answer.get("lr/resumed"), lr)
        if wrong := _differs(rank, what, got, losses, hint=hint):
            yield wrong
            continue
        wrongs = [
            _differs(
                rank,
                f"tensor {i} of the model at the end",
                answer.get(f"{i}/resumed"),
                value,
                hint="Buffers, such as a BatchNorm's running mean, belong to the model's state.",
            )
            for i, value in enumerate(tensors)
        ]
        yield from filter(None, wrongs)
        pairs = [(got, kept)]
        pairs += [
            (answer.get(f"{i}/resumed"), answer.get(f"{i}/whole")) for i in range(len(tensors))
        ]
        if not any(wrongs) and not all(_identical(*pair) for pair in pairs):
            yield Finding(
                "the resumed run is close to the one without a break, but not the same bit for "
                "bit: is something converted to a different type on the way?",
                rank,
            )


def _differs(rank: int, what: str, got: Any, right: np.ndarray, *, hint: str) -> Finding | None:
    """Like `oracle.differs`, with a tolerance for rounding errors that Adam amplifies."""
    atol = RTOL * float(np.abs(right).max())
    return differs(rank, what, got, right, rtol=RTOL, atol=atol, hint=hint)


def _identical(one: Any, two: Any) -> bool:
    both_arrays = isinstance(one, np.ndarray) and isinstance(two, np.ndarray)
    return both_arrays and np.array_equal(one, two)


def _hint(got: Any, right: np.ndarray, lr: Any, right_lr: np.ndarray) -> str:
    if not is_floats(got, right.shape):
        return ""
    if not np.isclose(got[0], right[0], rtol=1e-6):
        return "The first loss differs already: the model's state (state_dict) is not restored."
    if not (isinstance(lr, np.ndarray) and np.allclose(lr, right_lr, rtol=1e-6)):
        return (
            "The learning rate is not the one before the break: the optimizer keeps it, and the "
            "scheduler how far it has come. Both have a state_dict."
        )
    if not np.isclose(got[1], right[1], rtol=1e-6):
        return (
            "The first step differs: the optimizer's state_dict has Adam's moments and the options "
            "of its groups."
        )
    return "Later steps differ: the scheduler has a state_dict too."


# --- resume_rng ----------------------------------------------------------------------------------


def draw_rng(draw: Draw) -> list[Values]:
    """Three private seeds per rank, and how many draws to skip before the state is collected."""
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        values = oracle.draw_parameters(draw.shared(), SIZES)
        values |= {"settings": _settings(draw.shared("settings"))}
        values |= {"seeds": [int(s) for s in rng.integers(1, 2**31, 3)], "skip": 3 + rank % 3}
        inputs.append(values)
    return inputs


def _draws() -> list[float]:
    """The next numbers of the three generators that training code uses."""
    return [
        *torch.rand(3, dtype=torch.float64).tolist(),
        *np.random.random_sample(3).tolist(),
        *(random.random() for _ in range(3)),
        # A call of these two generates two numbers and keeps the second for the next call.
        float(np.random.standard_normal()),
        random.gauss(0.0, 1.0),
    ]


def _seed(seeds: list[int]) -> None:
    torch.manual_seed(seeds[0])
    np.random.seed(seeds[1])
    random.seed(seeds[2])


def observe_rng(functions: Any, inputs: Values, context: Context) -> Values:
    """The random numbers drawn after collect_state, and those drawn after restore_state."""
    collect_state, restore_state = functions
    with own_random_numbers():
        one = _training(inputs, inputs["settings"], context.device)
        two = _training(inputs, inputs["settings"], context.device)
        _seed(inputs["seeds"])
        for _ in range(inputs["skip"]):
            _draws()
        state = collect_state(one)
        whole = _draws()
        state = _through_a_file(state, context, strict=True)
        _seed([1, 2, 3])
        restore_state(two, state)
        answer = {"whole": np.array(whole), "resumed": np.array(_draws())}
        return answer | _observe_gpu(functions, inputs, context)


def _observe_gpu(functions: Any, inputs: Values, context: Context) -> Values:
    """The numbers of this rank's GPU after collect_state and after restore_state.

    They are left out if the functions need more of a GPU than `VirtualGpus` has.
    """
    collect_state, restore_state = functions
    gpus = VirtualGpus()
    one, two = (_training(inputs, inputs["settings"], context.device) for _ in range(2))
    state, answer = None, {}
    gpus.generator.manual_seed(inputs["seeds"][0]).draw(inputs["skip"])
    with contextlib.suppress(Exception), gpus.found_by(functions):
        state = collect_state(one)
    whole = np.array(gpus.generator.draw(3))
    collected: list[Any] = [None] * context.world_size
    dist.all_gather_object(collected, state is not None)
    if all(collected):
        state = _through_a_file(state, context, strict=True)
        gpus.generator.manual_seed(1)
        with contextlib.suppress(Exception), gpus.found_by(functions):
            restore_state(two, state)
            answer = {"gpu/whole": whole, "gpu/resumed": np.array(gpus.generator.draw(3))}
    return answer | {"gpu/refused": gpus.refused}


def _expected_draws(inputs: Values) -> np.ndarray:
    seeds = inputs["seeds"]
    one = torch.Generator().manual_seed(seeds[0])
    two, three = np.random.RandomState(seeds[1]), random.Random(seeds[2])
    drawn: list[float] = []
    for _ in range(inputs["skip"] + 1):
        drawn = [
            *torch.rand(3, dtype=torch.float64, generator=one).tolist(),
            *two.random_sample(3).tolist(),
            *(three.random() for _ in range(3)),
            float(two.standard_normal()),
            three.gauss(0.0, 1.0),
        ]
    return np.array(drawn)


def judge_rng(case: Case) -> Iterator[Finding]:
    """The random numbers of torch, NumPy and Python continue on every rank as without a break.

    All ranks may gather the states, or rank 0 alone.
    """
    expected = [_expected_draws(inputs) for inputs in case.inputs]
    of_gpus = [_expected_of_gpu(inputs) for inputs in case.inputs]
    for rank, answer in enumerate(case.answers):
        right, got = expected[rank], answer.get("resumed")
        if not np.array_equal(answer.get("whole", ()), right):
            yield Finding("collect_state itself draws random numbers.", rank)
            continue
        if not isinstance(got, np.ndarray) or got.shape != right.shape:
            yield Finding("no random numbers came back.", rank)
            continue
        if np.array_equal(got, right):
            yield from _judge_gpu(rank, answer, of_gpus)
            continue
        wrong = [
            name
            for name, places in {
                "torch": [0, 1, 2],
                "NumPy": [3, 4, 5, 9],
                "random": [6, 7, 8, 10],
            }.items()
            if not np.array_equal(got[places], right[places])
        ]
        why = "their states are not restored."
        if rank and np.array_equal(got, expected[0]):
            why = (
                "this rank now draws rank 0's numbers, and dropout would be the same. Gather the "
                "states of all ranks, and give each its own, by RANK (the last rank is alone on a "
                "second node here: its LOCAL_RANK is 0)."
            )
        yield Finding(
            f"after restore_state the random numbers of {', '.join(wrong)} are not those that "
            f"came after collect_state: {why}",
            rank,
        )


def _expected_of_gpu(inputs: Values) -> np.ndarray:
    generator = GpuGenerator().manual_seed(inputs["seeds"][0])
    generator.draw(inputs["skip"])
    return np.array(generator.draw(3))


def _judge_gpu(rank: int, answer: Values, expected: list[np.ndarray]) -> Iterator[Finding]:
    where = "where torch finds a GPU for each rank (torch.cuda is a stand-in here),"
    whole, got = answer.get("gpu/whole"), answer.get("gpu/resumed")
    if refused := answer.get("gpu/refused"):
        yield Finding(
            f"{where} the state of this rank's GPU cannot be collected and restored: "
            f"{str(refused)[:200]}.",
            rank,
        )
    elif whole is not None and not np.array_equal(whole, expected[rank]):
        yield Finding(f"{where} collect_state itself draws random numbers of the GPU.", rank)
    elif got is not None and not np.array_equal(got, expected[rank]):
        of = [other for other, numbers in enumerate(expected) if np.array_equal(got, numbers)]
        why = (
            f"they are those of rank {of[0]}: give each rank its own, by RANK."
            if of
            else "torch.cuda.get_rng_state() and set_rng_state(…) are the GPU's."
        )
        yield Finding(
            f"{where} its random numbers after restore_state are not those that came after "
            f"collect_state: {why}",
            rank,
        )


# --- resume_sampler ------------------------------------------------------------------------------


def draw_sampler(draw: Draw) -> list[Values]:
    """A sampler in the middle of its second epoch, at the end of that epoch, and in the third."""
    rng = draw.shared()
    values = oracle.draw_parameters(rng, SIZES)
    values |= {
        "settings": _settings(rng),
        "taken": [int(rng.integers(13, 21)), 22, int(rng.integers(23, 31))],
        "step": int(rng.integers(5, 500)),
    }
    return [dict(values) for _ in range(draw.world_size)]


def observe_sampler(functions: Any, inputs: Values, context: Context) -> Values:
    """The step number and the next samples, with and without a break."""
    collect_state, restore_state = functions
    answer: Values = {"whole": [], "resumed": [], "places": []}
    with own_random_numbers():
        for taken in inputs["taken"]:
            one = _training(inputs, inputs["settings"], context.device)
            two = _training(inputs, inputs["settings"], context.device)
            one.sampler.take(taken)
            one.step = inputs["step"]
            state = _through_a_file(collect_state(one), context, strict=False)
            restore_state(two, state)
            place = [getattr(two.sampler, name, None) for name in ("epoch", "position")]
            answer["places"].append([n if isinstance(n, int) else described(n) for n in place])
            answer["whole"].append([int(one.step), *one.sampler.take(15)])
            answer["resumed"].append([int(two.step), *two.sampler.take(15)])
    return answer


def judge_sampler(case: Case) -> Iterator[Finding]:
    """The sampler continues at its epoch and position, and the step number is restored."""
    given = case.inputs[0]
    for rank, answer in enumerate(map(plain, case.answers)):
        for number, taken in enumerate(given["taken"]):
            sampler = Positions(11, given["settings"]["seed"])
            sampler.take(taken)
            place = [sampler.epoch, sampler.position]
            right = [given["step"], *sampler.take(15)]
            whole, got, now = (
                item_of(answer.get(key), number) for key in ("whole", "resumed", "places")
            )
            if problem := _misplaced(whole, got, right, place, now):
                yield Finding(problem, rank)
                break


def _misplaced(whole: Any, got: Any, right: list[int], place: list[int], now: Any) -> str:
    """What is wrong with step and samples after one break; "" if nothing is.

    Args:
        place: the epoch and the position at which the state was collected; now: after
            restore_state.
    """
    if whole != right:
        return "collect_state changed the step or the sampler."
    if not isinstance(got, list) or len(got) != len(right):
        return "nothing came back."
    if got[0] != right[0]:
        return f"training.step after restore_state: expected {right[0]}, got {got[0]}."
    samples = f"the next samples should be {right[1:6]} …, they are {got[1:6]} …"
    if got != right and now == place:
        return (
            f"sampler.epoch and sampler.position are {place} after restore_state, as they should "
            f"be, and yet {samples}."
        )
    if got != right:
        return (
            f"[sampler.epoch, sampler.position] after restore_state: expected {place}, got {now}. "
            f"So {samples}: some would be seen twice and others not at all."
        )
    return ""
