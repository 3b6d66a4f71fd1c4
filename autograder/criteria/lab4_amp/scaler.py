"""Criteria for a loss scaler: what it does to losses, gradients, steps and its own scale.

The referee draws different gradients for each rank. They are multiplied by the scale that the
scaler itself reports, so a scaler with a wrong scale still gets the gradients that fit its scale.
Overflows are placed where the referee drew them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import described, read_number, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs

SHAPES = ((3, 4), (5,), (2, 2))
LR, WEIGHT_DECAY = 0.25, 0.1  # with decay, a step with zero gradients differs from a skipped step
NEVER = 1_000_000  # a growth interval that no check reaches


# --- helpers -------------------------------------------------------------------------------------


def draw_gradients(rng: np.random.Generator) -> list[np.ndarray]:
    """One gradient per parameter, of ordinary size."""
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def draw_start(rng: np.random.Generator) -> Values:
    """Parameters p0, p1, …"""
    return {f"p{i}": rng.normal(size=s).astype(np.float32) for i, s in enumerate(SHAPES)}


def make_parameters(inputs: Values, context: Context) -> list[torch.nn.Parameter]:
    """The parameters of this rank, on its device."""
    return [
        torch.nn.Parameter(torch.from_numpy(a.copy()).to(context.device))
        for a in oracle.parameters_of(inputs)
    ]


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], two_groups: bool = True
) -> torch.optim.Optimizer:
    """Plain SGD with weight decay, in two groups or one."""
    if not two_groups:
        return torch.optim.SGD(parameters, lr=LR, weight_decay=WEIGHT_DECAY)
    groups = [{"params": list(parameters[:1])}, {"params": list(parameters[1:])}]
    return torch.optim.SGD(groups, lr=LR, weight_decay=WEIGHT_DECAY)


def begin(scaler: Any, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Begins a step: torch's GradScaler has no scale tensor before the first call of scale()."""
    scaler.scale(torch.zeros((), device=parameters[0].device))


def overflow_once(scaler: Any, inputs: Values, context: Context) -> bool:
    """Runs a step in which every gradient is inf; whether the gradients were cleared.

    False if the parameters have changed: different criteria judge a step that is not left out.
    """
    parameters, before = make_parameters(inputs, context), make_parameters(inputs, context)
    begin(scaler, parameters)
    for p in parameters:
        p.grad = torch.full_like(p, torch.inf)
    scaler.step(make_optimizer(parameters))
    left_out = all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    cleared = any(p.grad is None or not p.grad.any() for p in parameters)
    scaler.update()
    return left_out and cleared


def set_gradients(
    parameters: Sequence[torch.nn.Parameter], inputs: Values, key: str, scaler: Any
) -> None:
    """Sets p.grad as a backward of the scaled loss would; None where no gradient was drawn."""
    begin(scaler, parameters)
    scale = np.float32(read_number(scaler.get_scale(), "get_scale()"))
    for i, p in enumerate(parameters):
        grad = inputs.get(f"{key}/{i}")
        p.grad = None if grad is None else torch.from_numpy(grad * scale).to(p)


def values_of(tensors: Sequence[torch.Tensor | None]) -> list[np.ndarray]:
    """The tensors as arrays; an empty array for None."""
    return [np.zeros(0) if t is None else t.detach().cpu().numpy().copy() for t in tensors]


def same(got: Any, expected: Any) -> bool:
    """Equality of numbers, text and lists; False if the types differ, as for an array."""
    return isinstance(got, type(expected)) and got == expected


def stepped(parameters: Sequence[np.ndarray], gradients: Sequence[Any]) -> list[np.ndarray]:
    """The parameters after one step, in float64; without a gradient a parameter stays unchanged."""
    after = []
    for p, g in zip(parameters, gradients, strict=True):
        p = np.asarray(p, dtype=np.float64)
        after.append(p if g is None else p - LR * (np.asarray(g, np.float64) + WEIGHT_DECAY * p))
    return after


# --- scale ---------------------------------------------------------------------------------------


def draw_scale(draw: Draw) -> list[Values]:
    """Scales, some of them no powers of two, and private weights of a linear loss."""
    rng = draw.shared("scales")
    scales = [float(2 ** rng.integers(3, 9)), float(rng.integers(300, 3000)), 2.0**17]
    return [
        {"scales": scales}
        | draw_start(draw.private(rank))
        | {f"w{i}": g for i, g in enumerate(draw_gradients(draw.shared(f"weights {rank}")))}
        for rank in range(draw.world_size)
    ]


def observe_scale(scaler_class: Any, inputs: Values, context: Context) -> Values:
    """The scaled loss, the change of the loss itself, and the gradients of the scaled loss."""
    answer: Values = {"default": described(scaler_class().get_scale()), "scales": []}
    half = scaler_class(init_scale=2.0**16).scale(torch.tensor(2.5, dtype=torch.float16))
    if isinstance(half, torch.Tensor):
        answer["half"] = [str(half.dtype).removeprefix("torch."), read_number(half, "scale(loss)")]
    else:
        answer["half"] = described(half)
    for number, scale in enumerate(inputs["scales"]):
        scaler = scaler_class(init_scale=scale)
        parameters = make_parameters(inputs, context)
        loss = torch.zeros((), device=context.device)
        for i, p in enumerate(parameters):
            loss = loss + (p * torch.from_numpy(inputs[f"w{i}"]).to(p)).sum()
        before = loss.detach().clone()
        scaled = scaler.scale(loss)
        if not isinstance(scaled, torch.Tensor) or not scaled.requires_grad:
            answer["graph"] = "no graph" if isinstance(scaled, torch.Tensor) else described(scaled)
            return answer
        answer[f"scaled/{number}"] = scaled.detach().cpu().numpy().reshape(())
        answer[f"change/{number}"] = (loss.detach() - before).cpu().numpy().reshape(())
        scaled.backward()
        for i, p in enumerate(parameters):
            answer[f"g{number}/{i}"] = oracle.grad_of(p)
        answer["scales"].append(read_number(scaler.get_scale(), "get_scale()"))
    return answer | {"later": _scaled_later(scaler_class, inputs, context)}


def _scaled_later(scaler_class: Any, inputs: Values, context: Context) -> list[float]:
    """What scale() makes of 1 after a step that overflowed, and the scale then."""
    scaler = scaler_class(init_scale=4096.0, backoff_factor=0.125, growth_interval=NEVER)
    overflow_once(scaler, inputs, context)
    scaled = scaler.scale(torch.ones((), device=context.device))
    return [read_number(scaled, "scale(loss)"), read_number(scaler.get_scale(), "get_scale()")]


def judge_scale(case: Case) -> Iterator[Finding]:
    """scale() returns scale times the loss, with its graph; the loss itself does not change."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        if lost := told(answer, "graph"):
            why = f"scale(loss) returned {lost}"
            if lost == "no graph":
                why = "scale(loss) returned a tensor without the loss's graph"
            yield Finding(f"{why}: backward() must be able to start from it.", rank)
            continue
        yield from _findings_in_scales(rank, inputs, answer)
        if wrong := _first_wrong_value(rank, inputs, answer):
            yield wrong


def _findings_in_scales(rank: int, inputs: Values, answer: Values) -> Iterator[Finding]:
    """What get_scale() says, a loss in fp16, and the scale after a step that overflowed."""
    if not same(answer.get("default"), 65536.0):
        yield Finding(
            f"get_scale() of LossScaler(): expected 65536, got {answer.get('default')}.", rank
        )
    if not any(same(answer.get("half"), [f"float{n}", 163840.0]) for n in (32, 64)):
        yield Finding(
            "scale(loss) of a loss of 2.5 in fp16, at 65536: expected 163840 in float32, "
            f"got {answer.get('half')}. fp16 ends at 65504.",
            rank,
        )
    if not same(answer.get("scales"), inputs["scales"]):
        yield Finding(
            f"get_scale() with init_scale={inputs['scales']}: got {answer.get('scales')}.", rank
        )
    later = told(answer, "later")
    if not isinstance(later, list) or len(later) != 2 or later[0] != later[1]:
        yield Finding(
            f"after a step that overflowed, scale(1.0) and get_scale() are {later}: the "
            "loss has to be multiplied with the scale as it is now.",
            rank,
        )


def _first_wrong_value(rank: int, inputs: Values, answer: Values) -> Finding | None:
    """The first finding about scaled losses, the loss itself, or the gradients."""
    start = [p.astype(np.float64) for p in oracle.parameters_of(inputs)]
    weights = [inputs[f"w{i}"].astype(np.float64) for i in range(len(SHAPES))]
    terms = np.concatenate([(p * w).ravel() for p, w in zip(start, weights, strict=True)])
    for number, scale in enumerate(inputs["scales"]):
        what, atol = f"scale(loss) at scale {scale:g}", 1e-4 * scale * np.abs(terms).sum()
        wrong = differs(
            rank,
            what,
            answer.get(f"scaled/{number}"),
            np.asarray(scale * terms.sum()),
            rtol=1e-4,
            atol=atol,
        ) or differs(
            rank,
            "change of the loss itself",
            answer.get(f"change/{number}"),
            np.zeros(()),
            rtol=0.0,
            atol=0.0,
            hint="Return a new tensor: the loss is still to be logged.",
        )
        for i, weight in enumerate(weights):
            wrong = wrong or oracle.differs(
                rank,
                f"gradient {i} of {what}",
                answer.get(f"g{number}/{i}"),
                scale * weight,
                hint="Backward of the scaled loss must give scale times the gradient.",
            )
        if wrong:
            return wrong
    return None


# --- unscale -------------------------------------------------------------------------------------

BACKOFF = 0.125
UNSCALE_CASES = {
    "explicit": "unscale_, then step",
    "implicit": "step alone, which has to unscale",
    "twice": "unscale_ twice",
    "again": "a second round after update()",
    "changed": "a round after one that overflowed",
    "frozen": "a round whose first parameter was frozen after backward",
    "turned": "a round whose first gradient has the memory of its transpose",
    "overflowed": "a round that overflows in the last gradient",
}

AFTER_STEP = {"explicit": "unscale_, step and unscale_", "implicit": "step and unscale_"}


def draw_unscale(draw: Draw) -> list[Values]:
    """A scale for each case, and private gradients."""
    rng = draw.shared("scales")
    scales = {kind: float(2 ** rng.integers(4, 12)) for kind in UNSCALE_CASES}
    scales["implicit"] = float(rng.integers(100, 1000))
    inputs = []
    for rank in range(draw.world_size):
        values = {"scales": scales} | draw_start(draw.private(rank))
        for kind in UNSCALE_CASES:
            for i, grad in enumerate(draw_gradients(draw.shared(f"rank {rank} {kind}"))):
                values[f"{kind}/{i}"] = grad
        values["overflowed/2"] = np.full(SHAPES[2], np.inf, np.float32)
        inputs.append(values)
    return inputs


def observe_unscale(scaler_class: Any, inputs: Values, context: Context) -> Values:
    """Gradients after unscale_, parameters after step, and what a second unscale_ does."""
    answer: Values = {}
    for kind, scale in inputs["scales"].items():
        scaler = scaler_class(init_scale=scale, backoff_factor=BACKOFF, growth_interval=NEVER)
        parameters = make_parameters(inputs, context)
        optimizer = make_optimizer(parameters)
        if kind == "changed":
            answer["cleared"] = overflow_once(scaler, inputs, context)
        if kind == "again":
            set_gradients(parameters, inputs, "explicit", scaler)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        set_gradients(parameters, inputs, kind, scaler)
        first, grad = parameters[0], parameters[0].grad
        first.requires_grad_(kind != "frozen")
        if kind == "turned" and grad is not None:
            first.grad = grad.t().contiguous().t()
        held = [p.grad for p in parameters]  # like code that holds views of DDP's buckets
        if kind != "implicit":
            scaler.unscale_(optimizer)
        if kind == "twice":
            answer["second"] = _unscale_again(scaler, optimizer)
        if kind != "implicit":
            for i, grad in enumerate(values_of([p.grad for p in parameters])):
                answer[f"g/{kind}/{i}"] = grad
            answer[f"in place/{kind}"] = all(
                p.grad is grad for p, grad in zip(parameters, held, strict=True)
            )
        scaler.step(optimizer)
        for i, value in enumerate(values_of(parameters)):
            answer[f"p/{kind}/{i}"] = value
        if kind in AFTER_STEP:
            answer[f"late/{kind}"] = _unscale_again(scaler, optimizer)
        scaler.update()
    return answer


def _unscale_again(scaler: Any, optimizer: torch.optim.Optimizer) -> str:
    """What unscale_ raises."""
    try:
        scaler.unscale_(optimizer)
    except RuntimeError:
        return "RuntimeError"
    return "nothing was raised"


def _call_findings(answer: Values, rank: int) -> Iterator[Finding]:
    """A second unscale_ is an error; a step that is left out does not touch the gradients."""
    if not same(answer.get("second"), "RuntimeError"):
        yield Finding(
            "a second unscale_ before update(): expected a RuntimeError, but "
            f"{answer.get('second')}. It would divide twice without anybody noticing.",
            rank,
        )
    elif late := [k for k in AFTER_STEP if not same(answer.get(f"late/{k}"), "RuntimeError")]:
        yield Finding(
            f"{AFTER_STEP[late[0]]}, before update(): the last call has to raise a RuntimeError, "
            f"but {answer.get(f'late/{late[0]}')}. The gradients are unscaled already.",
            rank,
        )
    if answer.get("cleared") is not False:
        yield Finding(
            "a step that was left out has cleared the gradients: then step() has to call "
            "nothing. When they are cleared is up to the training loop.",
            rank,
        )


def _explain_unscaled(answer: Values, kind: str, gradients: Sequence[Any], scale: float) -> str:
    hint = "unscale_ divides each gradient by the scale, in place, once."
    first, *others = (answer.get(f"g/{kind}/{i}") for i in range(len(SHAPES)))
    factors = [1.0, *[scale] * len(others)]
    if all(
        isinstance(got, np.ndarray)
        and got.shape == np.shape(grad)
        and np.allclose(got, np.asarray(grad) * factor, rtol=1e-4)
        for got, grad, factor in zip((first, *others), gradients, factors, strict=True)
    ):
        hint += " (The first was divided; the others are in the optimizer's second param_group.)"
    return hint


def judge_unscale(case: Case) -> Iterator[Finding]:
    """Gradients are divided once per step, by unscale_ or step; a second unscale_ is an error."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        start = oracle.parameters_of(inputs)
        yield from _call_findings(answer, rank)
        for kind, what in UNSCALE_CASES.items():
            gradients = [inputs[f"{kind}/{i}"] for i in range(len(SHAPES))]
            before = start
            if kind == "again":
                before = stepped(start, [inputs[f"explicit/{i}"] for i in range(len(SHAPES))])
            if kind == "twice" and not same(answer.get("second"), "RuntimeError"):
                continue
            scale, began = inputs["scales"][kind], ""
            if kind == "changed":
                scale, began = scale * BACKOFF, f"; it began as {scale:g}"
            if kind != "implicit" and answer.get(f"in place/{kind}") is not True:
                yield Finding(
                    f"{what}: p.grad is not the tensor it was. unscale_ works in place.", rank
                )
                continue
            wrong = None
            shown = gradients[: 2 if kind == "overflowed" else None]
            for i, grad in enumerate(shown if kind != "implicit" else ()):
                wrong = wrong or oracle.differs(
                    rank,
                    f"{what} (scale {scale:g}{began}): gradient {i} after unscale_",
                    answer.get(f"g/{kind}/{i}"),
                    np.asarray(grad, np.float64),
                    hint=_explain_unscaled(answer, kind, gradients, scale),
                )
            # Different criteria judge whether a step that overflows is left out.
            after = stepped(before, gradients) if kind != "overflowed" else []
            for i, expected in enumerate(after):
                wrong = wrong or oracle.differs(
                    rank,
                    f"{what} (scale {scale:g}{began}): parameter {i} after step",
                    answer.get(f"p/{kind}/{i}"),
                    expected,
                    hint="The step needs gradients that were divided exactly once.",
                )
            if wrong:
                yield wrong
