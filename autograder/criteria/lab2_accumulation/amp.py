"""Criteria for accumulation with automatic mixed precision: one optimizer step per call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, told
from autograder.criteria.common.pretending import having, namespace, pretending
from autograder.criteria.common.training import wrap
from autograder.criteria.common.weights import norm
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab2_accumulation.emulated import DecidesInBackward
from autograder.criteria.lab2_accumulation.memory import peak_of, too_much_memory

SIZES = (6, 16, 3)
NUM_PARAMETERS = 4
SAMPLES, LR = 4, 0.5
MEMORY_K = 6
TOLERANCE = 0.06  # relative to the largest update; bfloat16 has 8 bits
INIT_SCALE = 4096.0
GROWTH, BACKOFF = 4.0, 0.125  # torch's own are 2 and 0.5
SCALE_FACTORS = (4.0, 0.5, 2.0, 0.25, 1.0, 0.125, 0.5, 0.0625, 0.25)  # after each call
ELSEWHERE = "meta"  # a device that is no rank's
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


# --- draw ----------------------------------------------------------------------------------------


def _draw(draw: Draw, calls: list[Values]) -> list[Values]:
    """The same weights on all ranks; per call equal micro-batches, with different data per rank."""
    start = oracle.draw_parameters(draw.shared("start"), SIZES) | {"calls": calls}
    return oracle.private_batches(draw, start, [(call["k"], SAMPLES) for call in calls], SIZES)


def draw_update(draw: Draw) -> list[Values]:
    """In each dtype a call with several micro-batches and a call with a single one."""
    k = int(draw.shared().integers(2, 5))
    return _draw(draw, [{"k": n, "dtype": dtype} for n in (k, 1) for dtype in DTYPES])


def draw_scaler(draw: Draw) -> list[Values]:
    """Calls with one scaler; in some, one micro-batch of one rank, or of two, is infinite.

    The first, a middle and the last micro-batch, and the first, a middle and the last rank, each
    get a turn. In these calls the norm is limited, too: a norm that is not finite must not stop the
    program. The last call has a single micro-batch.
    """
    rng, last = draw.shared("unlucky"), draw.world_size - 1
    k = int(rng.integers(3, 5))
    call = {"k": k, "dtype": "float16"}
    limited = call | {"max_norm": 1.0}
    calls = [limited if number % 2 else call for number in range(len(SCALE_FACTORS))]
    inputs = _draw(draw, [*calls[:-1], call | {"k": 1}])
    ranks = [int(r) for r in rng.permutation([0, draw.world_size // 2, last])]
    places = [int(i) for i in rng.permutation([0, 1, k - 1])]
    unlucky = [(call, [(r, i)]) for call, r, i in zip((1, 3, 5), ranks, places, strict=True)]
    for call, cells in [*unlucky, (7, [(0, 0), (last, k - 1)])]:
        for rank, place in cells:
            inputs[rank][f"x/{call}"][place] = np.inf  # in any dtype: autocast is not judged here
    return inputs


def draw_clip(draw: Draw) -> list[Values]:
    """Limits far below the gradient's norm, in each dtype; one limit is above it.

    Scaled gradients exceed both. The last calls have a single micro-batch.
    """
    k = int(draw.shared().integers(2, 5))
    calls = [*((k, dtype) for dtype in ("float16", *DTYPES)), *((1, dtype) for dtype in DTYPES)]
    inputs = _draw(draw, [{"k": n, "dtype": dtype} for n, dtype in calls])
    for number, factor in enumerate((0.25, 20.0, 0.25, 0.25, 0.25)):
        limit = factor * norm(_mean_gradient(inputs, number))
        for values in inputs:
            values["calls"] = [
                call | ({"max_norm": limit} if i == number else {})
                for i, call in enumerate(values["calls"])
            ]
    return inputs


def _mean_gradient(inputs: list[Values], number: int) -> list[np.ndarray]:
    """The mean over the samples of all ranks, at the initial weights."""
    x, y = (np.concatenate([i[f"{n}/{number}"] for i in inputs]) for n in "xy")
    return oracle.gradients(inputs[0], x.reshape(-1, SIZES[0]), y.reshape(-1, SIZES[-1]))


# --- observe -------------------------------------------------------------------------------------


def observe(amp_step: Any, inputs: Values, context: Context) -> Values:
    """Runs every call from the initial weights; returns parameters after it and its dtype."""
    answer: Values = {}
    for number, call in enumerate(inputs["calls"]):
        scaler = torch.amp.GradScaler(
            context.device.type, init_scale=INIT_SCALE, enabled=call["dtype"] == "float16"
        )
        _run(amp_step, inputs, context, answer, _Training(inputs, context), scaler, number)
    return answer


def observe_scaler(amp_step: Any, inputs: Values, context: Context) -> Values:
    """All calls train one model with one scaler, which grows after every good step."""
    scaler = torch.amp.GradScaler(
        context.device.type,
        init_scale=INIT_SCALE,
        growth_factor=GROWTH,
        backoff_factor=BACKOFF,
        growth_interval=1,
    )
    answer: Values = {}
    training = _Training(inputs, context)
    for number in range(len(inputs["calls"])):
        _run(amp_step, inputs, context, answer, training, scaler, number)
        if answer["scale/0"] == INIT_SCALE:
            break  # without update(), the next call would end with an error of torch's
    return answer


def observe_update(amp_step: Any, inputs: Values, context: Context) -> Values:
    """Like `observe`, and where autocast was on, and the memory of a step of large micro-batches.

    Also for which device autocast was asked when model and data were on `ELSEWHERE`.
    """
    answer = observe(amp_step, inputs, context)
    training, device = _Training(inputs, context), context.device.type
    x, y = (torch.from_numpy(inputs[f"{n}/0"][0]).to(context.device).repeat(40, 1) for n in "xy")
    on: dict[str, list[bool]] = {"loss": [], "backward": []}
    targets: set[torch.dtype] = set()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        on["loss"].append(torch.is_autocast_enabled(device))
        targets.add(target.dtype)
        return oracle.ordered(oracle.mse, answer)(output, target)

    def in_backward(gradient: torch.Tensor) -> None:
        on["backward"].append(torch.is_autocast_enabled(device))

    def one() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = oracle.mse(training.module(x), y)
        loss.backward()

    scaler = torch.amp.GradScaler(device, enabled=False)
    hook = next(training.module.parameters()).register_hook(in_backward)
    answer["peak"] = peak_of(
        lambda: amp_step(
            training.wrapped,
            [(x, y)] * MEMORY_K,
            loss_fn,
            training.optimizer,
            scaler,
            dtype=torch.bfloat16,
        ),
        one,
    )
    hook.remove()
    # The first backward that was noted is that of `one`.
    answer["cast"] = bool(targets - {y.dtype})
    answer["devices"] = _devices_of_autocast(amp_step, inputs)
    return answer | {"loss": all(on["loss"]), "backward": any(on["backward"][1:])}


def _devices_of_autocast(amp_step: Any, inputs: Values) -> list[str]:
    """The device types for which autocast is asked if model and data are on the device "meta"."""
    asked: list[str] = []

    class Autocast(contextlib.ContextDecorator):
        def __init__(self, device_type: str, *_: Any, **__: Any) -> None:
            asked.append(str(device_type))

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    module = oracle.mlp(inputs).to(ELSEWHERE)
    batch = tuple(torch.from_numpy(inputs[f"{n}/0"][0]).to(ELSEWHERE) for n in "xy")
    names = namespace(amp_step)
    places = {"DEVICE": torch.device(ELSEWHERE)} if "DEVICE" in names else {}
    # The step fails, because tensors on this device have no values. Autocast is called before that.
    with (
        contextlib.suppress(Exception),
        having(names, places),
        pretending(amp_step, {(m, "autocast"): Autocast for m in (torch, torch.amp)}),
    ):
        amp_step(
            DecidesInBackward(module),
            [batch] * 2,
            oracle.mse,
            torch.optim.SGD(module.parameters(), lr=LR),
            torch.amp.GradScaler(enabled=False),
            dtype=torch.bfloat16,
        )
    return asked


class _Training:
    """A wrapped model with its optimizer of two parameter groups, whose steps are counted."""

    def __init__(self, inputs: Values, context: Context) -> None:
        self.module = oracle.mlp(inputs).to(context.device)
        self.wrapped = wrap(self.module, context)
        first, *rest = self.module.parameters()
        self.optimizer = torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=LR)
        self.num_steps, self.dtypes = 0, set()
        self.optimizer.register_step_pre_hook(self._count)
        self.module[0].register_forward_hook(self._note)

    def _count(self, *_: Any) -> None:
        self.num_steps += 1

    def _note(self, module: Any, arguments: Any, output: torch.Tensor) -> None:
        self.dtypes.add(str(output.dtype).removeprefix("torch."))


def _run(
    amp_step: Any,
    inputs: Values,
    context: Context,
    answer: Values,
    training: _Training,
    scaler: Any,
    number: int,
) -> None:
    call = inputs["calls"][number]
    training.optimizer.zero_grad()
    training.dtypes.clear()
    xs, ys = (torch.from_numpy(inputs[f"{n}/{number}"]).to(context.device) for n in "xy")
    options = {"max_norm": call["max_norm"]} if "max_norm" in call else {}
    amp_step(
        training.wrapped,
        list(zip(xs, ys, strict=True)),
        oracle.mse,
        training.optimizer,
        scaler,
        dtype=DTYPES[call["dtype"]],
        **options,
    )
    answer[f"scale/{number}"] = float(scaler.get_scale())
    answer[f"steps/{number}"] = training.num_steps
    answer[f"dtypes/{number}"] = sorted(training.dtypes)
    for i, p in enumerate(training.module.parameters()):
        answer[f"p{number}/{i}"] = p.detach().cpu().numpy().copy()


# --- judge ---------------------------------------------------------------------------------------


def _judge_update(
    case: Case,
    rank: int,
    number: int,
    factor: float,
    hint: str,
    of: Sequence[Values] = (),
) -> Finding | None:
    """A finding unless the weights moved by -lr * factor * mean gradient, within the tolerance.

    Args:
        of: the inputs of the ranks over which the mean is taken; if empty, of all ranks.
    """
    inputs, answer = case.inputs[rank], case.answers[rank]
    call = inputs["calls"][number]
    before = oracle.parameters_of(inputs)
    expected = [-LR * factor * g for g in _mean_gradient(list(of or case.inputs), number)]
    largest = max(float(np.abs(e).max()) for e in expected)
    for i, (start, update) in enumerate(zip(before, expected, strict=True)):
        got = answer.get(f"p{number}/{i}")
        if not is_floats(got, start.shape):
            return Finding(f"parameter {i}: no value of its shape was left.", rank)
        moved = got.astype(np.float64) - start
        if not np.isfinite(moved).all():
            return Finding(f"parameter {i} is not finite after the step.", rank)
        # Weights are float32: adding a tiny update to them rounds it.
        allowed = TOLERANCE * largest + 1e-6
        if np.abs(moved - update).max() > allowed:
            place = int(np.abs(moved - update).argmax())
            return Finding(
                f"{call['k']} micro-batches in {call['dtype']}: parameter {i} moved by "
                f"{moved.ravel()[place]:.4g} at {place}, expected {update.ravel()[place]:.4g}. "
                f"{hint}",
                rank,
            )
    return None


def _texts(value: Any) -> list[str]:
    """The texts in what should be a list of them."""
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def judge_update(case: Case) -> Iterator[Finding]:
    """One step with the mean gradient of all micro-batches and ranks; forward runs in the dtype.

    After the step, the gradients may hold anything.
    """
    found = [list(_wrong_calls(case, rank)) for rank in range(case.world_size)]
    for findings in found:
        yield from findings
    for rank, answer in enumerate(case.answers):
        if not found[rank] and (peak := too_much_memory(answer.get("peak"), rank)):
            yield peak


def _wrong_calls(case: Case, rank: int) -> Iterator[Finding]:
    """What is wrong with a rank's calls: the first wrong step, and the first wrong forward pass."""
    answer, wrong = case.answers[rank], None
    for number, call in enumerate(case.inputs[rank]["calls"]):
        if told(answer, f"dtypes/{number}") != [call["dtype"]]:
            yield Finding(
                f"the first layer computed in {answer.get(f'dtypes/{number}')}, expected "
                f"{call['dtype']}: run forward under torch.autocast(device_type, dtype=dtype).",
                rank,
            )
            return
        if told(answer, "loss") is False:
            yield Finding("autocast was off when loss_fn was called: it belongs inside.", rank)
            return
        if told(answer, "backward") is True:
            yield Finding("autocast was on during backward: only forward and loss need it.", rank)
            return
        if told(answer, "cast") is True:
            yield Finding(
                "the targets reached loss_fn in a different dtype: autocast casts what an "
                "operation needs, the data stay as they are.",
                rank,
            )
            return
        if others := [d for d in _texts(told(answer, "devices")) if d != ELSEWHERE]:
            yield Finding(
                f"autocast was asked for the device type {others[0]!r}, and the data were on a "
                "different device: take it from them.",
                rank,
            )
            return
        if swapped := oracle.find_misused_loss(answer, rank):
            yield swapped
            return
        hint = (
            "Divide each loss by their number, backward scaler.scale(loss), the last one (or the "
            "only one) outside no_sync(), and let scaler.step(optimizer) make the one step."
        )
        if not wrong and (wrong := _judge_update(case, rank, number, 1.0, hint)):
            yield wrong


def judge_scaler(case: Case) -> Iterator[Finding]:
    """The scale grows once per step. An overflow on any rank reduces it, and all skip the step."""
    for rank, answer in enumerate(case.answers):
        for number, factor in enumerate(SCALE_FACTORS):
            scale, got = told(answer, f"scale/{number}"), told(answer, f"steps/{number}")
            count = number // 2 + 1  # every other call overflows
            what = "an overflow somewhere" if number % 2 else "a step without overflow"
            if scale != INIT_SCALE * factor:
                yield Finding(
                    f"call {number}, {what}: the scale is {scale}, expected {INIT_SCALE * factor}. "
                    + (
                        "An overflow in any micro-batch of any rank has to reach scaler.step()."
                        if number % 2
                        else "scaler.update() belongs once after scaler.step(optimizer), and both "
                        "after the last micro-batch."
                    ),
                    rank,
                )
                break
            if got != count:
                yield Finding(
                    f"after call {number}, {what}: {got} optimizer steps, expected {count}.",
                    rank,
                )
                break


def judge_clip(case: Case) -> Iterator[Finding]:
    """The limit applies to the true gradient, not to the scaled gradient.

    `judge_update` judges a gradient that was not divided by the number of micro-batches, and one
    that was not synchronised in a call with a single micro-batch. The scaled gradient may be
    clipped to a scaled limit.
    """
    for rank in range(case.world_size):
        for number, call in enumerate(case.inputs[rank]["calls"]):
            size = norm(_mean_gradient(list(case.inputs), number))
            limit = call["max_norm"]
            hint = (
                f"The norm over all parameters is {size:.3g}, max_norm {limit:.3g}: once, after "
                "the last micro-batch, scaler.unscale_(optimizer), then clip all parameters "
                "together, then scaler.step(optimizer)."
            )
            own = [case.inputs[rank]] if call["k"] == 1 else []
            own_limit = limit / norm(_mean_gradient(own or list(case.inputs), number))
            wrong = _judge_update(case, rank, number, min(1.0, limit / size), hint)
            undivided = _judge_update(case, rank, number, min(float(call["k"]), limit / size), hint)
            alone = _judge_update(case, rank, number, min(1.0, own_limit), hint, own)
            if wrong and undivided and alone:
                yield wrong
                break
