"""Criteria for single steps: what is averaged, what is waited for, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.bonus_debug_ddp import causes
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import item_of, told
from autograder.criteria.common.training import wrap
from autograder.criteria.common.weights import are_close, batch_gradients, collect, weights_of
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs
from autograder.criteria.lab2_accumulation import ddp

SIZES = (6, 9, 3)
SAMPLES = 4


def _draw_batches(draw: Draw, steps: int, dtype: str) -> list[Values]:
    """The same weights on all ranks; different data on each rank and in each step."""
    start = oracle.draw_parameters(draw.shared(), SIZES) | {"steps": steps, "dtype": dtype}
    return oracle.private_batches(draw, start, [(SAMPLES,)] * steps, SIZES)


def _global_batch(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of all ranks."""
    x, y = (np.concatenate([i[f"{n}/{step}"] for i in case.inputs]) for n in "xy")
    return torch.from_numpy(x).double(), torch.from_numpy(y).double()


def _told_parameters(answer: Values, model: nn.Module) -> None:
    for i, p in enumerate(model.parameters()):
        answer[f"p{i}"] = p.detach().cpu().numpy().copy()


# --- one step by hand ----------------------------------------------------------------------------

LR = {"adam": 0.05, "sgd": 0.2}
ADAM_TOLERANCE = 0.02  # relative to the learning rate; a gradient's scale hardly changes the step


class _Shifted(nn.Module):
    """An MLP, and a parameter that is in no layer."""

    def __init__(self, inputs: Values, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(SIZES[-1], dtype=dtype))
        self.layers = oracle.mlp(inputs, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.shift


def draw_adam(draw: Draw) -> list[Values]:
    """Steps with Adam: the mean of the ranks' steps is not the step with the mean gradient."""
    return [i | {"optimizer": "adam"} for i in _draw_batches(draw, 3, "float64")]


def draw_sgd(draw: Draw) -> list[Values]:
    """Steps with SGD: a wrong scale of the gradient changes the weights.

    All ranks have the same samples, so averaging the wrong tensors costs only `debug_step_adam`.
    """
    inputs = _draw_batches(draw, 2, "float64")
    return [inputs[0] | {"optimizer": "sgd"} for _ in inputs]


def _start(inputs: Values, device: Any = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, with a group for the first parameters and one for others."""
    lr, model = LR[inputs["optimizer"]], _Shifted(inputs).to(device)
    params = list(model.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": lr / 2}]
    kind = torch.optim.SGD if inputs["optimizer"] == "sgd" else torch.optim.Adam
    return model, kind(groups, lr=lr)


def observe_step(train_step: Any, inputs: Values, context: Context) -> Values:
    """The weights after a few calls of `train_step`."""
    model, optimizer = _start(inputs, context.device)
    for step in range(inputs["steps"]):
        x, y = (torch.from_numpy(inputs[f"{n}/{step}"]).double() for n in "xy")
        x, y = x.to(context.device), y.to(context.device)
        if inputs["optimizer"] == "adam":  # old gradients cost only `debug_step_mean`
            optimizer.zero_grad()
        elif step == 0:  # leaves old gradients in p.grad
            oracle.mse(model(x), y).backward()
        train_step(model, optimizer, oracle.mse, x, y)
    answer: Values = {}
    _told_parameters(answer, model)
    return answer


def _one_process(case: Case) -> list[np.ndarray]:
    model, optimizer = _start(case.inputs[0])
    for step in range(case.inputs[0]["steps"]):
        optimizer.zero_grad()
        x, y = _global_batch(case, step)
        oracle.mse(model(x), y).backward()
        optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


def _explain_adam(case: Case) -> str:
    """A hint that depends on which parameters differ between ranks."""
    first, *others = case.answers
    names = [name for name in first if name[:1] == "p" and name[1:].isdigit()]
    apart = [
        name
        for name in names
        if any(not np.array_equal(first[name], other.get(name, ())) for other in others)
    ]
    if not apart:
        return (
            "The mean of the ranks' Adam steps is not the step with the mean gradient: average the "
            "gradients, before optimizer.step()."
        )
    if len(apart) == len(names):
        return (
            "No parameter is equal on all ranks: average the gradients, each parameter's, on every "
            "rank (a reduce leaves the sum on one). The mean of the losses is only a number, and "
            "backward knows only this rank's samples."
        )
    which = ", ".join(name[1:] for name in apart)
    where = ""
    if apart == ["p0"]:
        where = " It is in no layer: model.parameters() has it, and no child of the model."
    elif apart == names[3:]:  # see `_start`
        where = " They are the optimizer's second group: average those of all groups."
    return f"The ranks disagree on parameters {which}: their gradients were not averaged.{where}"


def judge_adam(case: Case) -> Iterator[Finding]:
    """The weights are those of one process that trains with Adam on the batch of all ranks."""
    for rank, answer in enumerate(case.answers):
        for i, expected in enumerate(_one_process(case)):
            if wrong := differs(
                rank,
                f"Adam: parameter {i} after {case.inputs[0]['steps']} steps",
                answer.get(f"p{i}"),
                expected,
                rtol=0.0,
                atol=ADAM_TOLERANCE * LR["adam"],
                hint=_not_waited_for(case, rank) or _explain_adam(case),
            ):
                yield wrong
                break


def _not_waited_for(case: Case, rank: int) -> str:
    """A sentence if a rank left collectives under way, else ""."""
    events = case.trace.events[rank]
    begun, ended = ({e.key for e in events if e.kind == kind} for kind in ("issue", "wait"))
    if left := begun - ended:
        return f"Nobody waited for {len(left)} of {len(begun)} collectives: wait() on each handle."
    return ""


def judge_sgd(case: Case) -> Iterator[Finding]:
    """The weights are those of one process that trains with SGD on the batch of all ranks."""
    for rank, answer in enumerate(case.answers):
        for i, expected in enumerate(_one_process(case)):
            what = f"SGD on {case.world_size} ranks: parameter {i} after 2 steps"
            if wrong := oracle.differs(rank, what, answer.get(f"p{i}"), expected, dtype="float64"):
                hint = "It is right to float32's digits only: these gradients are float64."
                if not oracle.agrees(answer.get(f"p{i}"), expected):
                    hint = _not_waited_for(case, rank) or causes.explain_sgd(case, rank, _start)
                    hint = hint or (
                        "A mean over ranks divides by the number of ranks, once, whatever that is "
                        "(LOCAL_WORLD_SIZE is another number). And what was in p.grad before a "
                        "call does not count."
                    )
                yield causes.because(wrong, hint)
                break


# --- accumulation --------------------------------------------------------------------------------


def draw_accumulate(draw: Draw) -> list[Values]:
    """One micro-batch, then numbers that are not the world size; different data on each rank."""
    rng, sizes = draw.shared(), ddp.SIZES
    several = rng.permutation([k for k in (2, 3, 4, 5) if k != draw.world_size])[:2]
    ks = [1, *(int(k) for k in several)]
    start = oracle.draw_parameters(rng, sizes) | {"ks": ks}
    return oracle.private_batches(draw, start, [(k, SAMPLES) for k in ks], sizes)


def observe_accumulate(accumulate: Any, inputs: Values, context: Context) -> Values:
    """As in lab 2; also how many samples went through the model in each call."""
    counts: list[int] = []

    def count(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        counts[-1] += args[0].shape[:-1].numel()

    def counted(ddp_model: Any, micro_batches: Any, loss_fn: Any) -> Any:
        counts.append(0)
        handle = ddp_model.module.register_forward_pre_hook(count)
        try:
            return accumulate(ddp_model, micro_batches, loss_fn)
        finally:
            handle.remove()

    return ddp.observe_samples(counted, inputs, context) | {"counts": counts}


def judge_loss(case: Case) -> Iterator[Finding]:
    """The mean loss of all ranks, from the forward passes whose gradients are in p.grad."""
    findings = ddp.judge_loss(case)
    yield from findings
    for rank, answer in enumerate(case.answers) if not findings else ():
        for call, k in enumerate(case.inputs[0]["ks"]):
            got = item_of(told(answer, "counts"), call)
            if got != k * SAMPLES:
                yield Finding(
                    f"{k} micro-batches of {SAMPLES} samples: {got} samples went through the "
                    f"model, expected {k * SAMPLES}. A second forward pass costs time, and "
                    "with dropout its loss is not the one whose gradient is in p.grad.",
                    rank,
                )
                break


def judge_accumulate(case: Case) -> list[Finding]:
    """Each of the W k micro-batches has weight 1/(W k); a second division by W has its own text."""
    findings = list(ddp.judge_gradients(case))
    if findings and case.world_size > 1 and _is_divided_twice(case):
        return [
            Finding(
                f"every p.grad is {1 / case.world_size:.3g} of what it should be: it was divided "
                "by the number of ranks twice. DDP does it, too."
            )
        ]
    return findings


def _is_divided_twice(case: Case) -> bool:
    for call, k in enumerate(case.inputs[0]["ks"]):
        pairs = [
            (x, y) for i in case.inputs for x, y in zip(i[f"x/{call}"], i[f"y/{call}"], strict=True)
        ]
        basis = batch_gradients(case.inputs[0], pairs)
        for answer in case.answers:
            weights = weights_of(basis, collect(answer, f"g{call}", len(basis[0])))
            if weights is None or not are_close(
                weights, np.full(len(pairs), 1 / (k * case.world_size**2))
            ):
                return False
    return True


# --- a step with a scaler ------------------------------------------------------------------------

INIT_SCALE, NO_LIMIT = 1024.0, 1e30
GROUP = 3  # parameters in the optimizer's first group


def _draw_scaled(draw: Draw, steps: int, **options: Any) -> list[Values]:
    return [i | options for i in _draw_batches(draw, steps, "float32")]


def _momentum(module: nn.Module, inputs: Values) -> torch.optim.Optimizer:
    """With momentum a step moves the weights even if the gradient is zero."""
    params = list(module.parameters())
    parts = [params[:GROUP], params[GROUP:]] if inputs["groups"] else [params]
    return torch.optim.SGD([{"params": part} for part in parts], lr=0.1, momentum=0.5)


def draw_scaler(draw: Draw) -> list[Values]:
    """The scale grows after two good steps in a row; two steps overflow, each on one rank.

    An infinite input makes all gradients nan but the first and the last parameter's. An infinite
    target makes gradients infinite, and none nan. The last step's gradients are finite, and too
    large for fp16 when they are scaled.
    """
    options = {"max_norm": NO_LIMIT, "clear": False, "groups": False}
    inputs = _draw_scaled(draw, 7, growth_interval=2, **options)
    rng = draw.shared("unlucky")
    for name, step in zip("xy", 2 + rng.permutation(4)[:2], strict=True):
        inputs[int(rng.integers(draw.world_size))][f"{name}/{step}"][0, 0] = np.inf
    for values in inputs:
        values["y/6"] *= 1000
    return inputs


def draw_clip(draw: Draw) -> list[Values]:
    """The scale never changes; the clipping limit is below the gradient's norm.

    The check clears the gradients: those that stay from an earlier step cost only
    `debug_amp_order`. The optimizer has two parameter groups here, and only here.
    """
    options = {"max_norm": 0.0, "clear": True, "groups": True}
    inputs = _draw_scaled(draw, 2, growth_interval=1000, **options)
    case = Case(draw.world_size, inputs, [])
    size = _norm(_gradients(case, _Shifted(inputs[0]), 0))
    for values in inputs:
        values["max_norm"] = 0.4 * size
    return inputs


def observe_scaled(subject: Any, inputs: Values, context: Context) -> Values:
    """The scale after each step, the gradient that each loss received, and the final weights."""
    amp_step, scaler_class = subject
    module = _Shifted(inputs, torch.float32).to(context.device)
    ddp_model = wrap(module, context)
    optimizer = _momentum(module, inputs)
    scaler = scaler_class(INIT_SCALE, inputs["growth_interval"])
    scales: list[float] = []
    incoming: list[float] = []
    for step in range(inputs["steps"]):
        x, y = (torch.from_numpy(inputs[f"{n}/{step}"]).to(context.device) for n in "xy")
        if inputs["clear"]:
            optimizer.zero_grad()
        loss = oracle.mse(ddp_model(x), y)
        loss.register_hook(lambda gradient: incoming.append(float(gradient)))
        amp_step(ddp_model, optimizer, scaler, loss, max_norm=inputs["max_norm"])
        scales.append(float(scaler.scale))
    answer: Values = {"scales": scales, "incoming": incoming}
    _told_parameters(answer, module)
    return answer


def _gradients(case: Case, model: nn.Module, step: int) -> list[np.ndarray]:
    model.zero_grad()
    x, y = _global_batch(case, step)
    oracle.mse(model(x), y).backward()
    return [oracle.grad_of(p).copy() for p in model.parameters()]


def _norm(gradients: list[np.ndarray]) -> float:
    return float(np.sqrt(sum((g**2).sum() for g in gradients)))


def _shortened(gradients: list[np.ndarray], max_norm: float) -> list[np.ndarray]:
    return [g * min(1.0, max_norm / (_norm(gradients) + 1e-6)) for g in gradients]


def _expected(case: Case, mistake: str = "") -> tuple[list[np.ndarray], list[float]]:
    """The weights after all steps, and the scale after each step; also with a known mistake."""
    inputs = case.inputs[0]
    model = _Shifted(inputs)
    optimizer = _momentum(model, inputs)
    scale, good, scales = INIT_SCALE, 0, []
    for step in range(inputs["steps"]):
        gradients = _gradients(case, model, step)
        if all(np.isfinite(g).all() for g in gradients):
            limit, factor = inputs["max_norm"], 1.0
            if mistake == "clips each":
                gradients = [_shortened([g], limit)[0] for g in gradients]
            elif mistake == "clips groups":
                first, second = gradients[:GROUP], gradients[GROUP:]
                gradients = _shortened(first, limit) + _shortened(second, limit)
            elif mistake == "clips values":
                gradients = [g.clip(-limit, limit) for g in gradients]
            else:
                gradients = _shortened(gradients, limit)
            if mistake == "updated first" and good + 1 == inputs["growth_interval"]:
                factor = 0.5
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = factor * torch.from_numpy(g)
            optimizer.step()
            good += 1
            if good == inputs["growth_interval"]:
                scale, good = scale * 2, 0
        else:
            scale, good = scale / 2, 0
            if mistake == "steps with zeros":
                optimizer.zero_grad(set_to_none=False)
                optimizer.step()
        scales.append(scale)
    return [p.detach().numpy() for p in model.parameters()], scales


def _judge_scaled(
    case: Case, explain: Callable[[Case], str], *, with_scales: bool
) -> Iterator[Finding]:
    parameters, scales = _expected(case)
    for rank, answer in enumerate(case.answers):
        got = told(answer, "scales")
        if with_scales and got != scales:
            yield Finding(
                f"the scale after each step: {got}, expected {scales}. "
                + (
                    causes.explain_scales(case, rank, INIT_SCALE)
                    or "It is updated once per step, with whether any number in any gradient is "
                    "not finite, on any rank."
                ),
                rank,
            )
            continue
        for i, expected in enumerate(parameters):
            what = f"parameter {i} after {case.inputs[0]['steps']} steps"
            if wrong := oracle.differs(rank, what, answer.get(f"p{i}"), expected):
                yield causes.because(wrong, explain(case))
                break


def judge_scaler(case: Case) -> Iterable[Finding]:
    """Backward starts from the loss times the scale; gradients are divided by the same scale."""
    _, scales = _expected(case)
    expected = [INIT_SCALE, *scales[:-1]]
    for rank, answer in enumerate(case.answers):
        if told(answer, "scales") == scales and told(answer, "incoming") != expected:
            return [
                Finding(
                    f"backward began with {told(answer, 'incoming')}, one number per step, "
                    f"expected the scales {expected}: without it small gradients of fp16 are lost.",
                    rank,
                )
            ]
    return _judge_scaled(case, _explain_scaled, with_scales=True)


def _is_mistake(case: Case, mistake: str) -> bool:
    """Whether all ranks have the weights that a known mistake leads to."""
    values = _expected(case, mistake)[0]
    return all(
        oracle.agrees(answer.get(f"p{i}"), value)
        for answer in case.answers
        for i, value in enumerate(values)
    )


def _explain_scaled(case: Case) -> str:
    for mistake, hint in (
        (
            "updated first",
            "Where the scale has grown, the gradient was divided by the new one: divide by the "
            "scale that this step's loss was multiplied with, and update it then.",
        ),
        (
            "steps with zeros",
            "Where a gradient was not finite, the optimizer took a step with zeros: it has "
            "momentum, and the weights moved. There it takes no step.",
        ),
    ):
        if _is_mistake(case, mistake):
            return hint
    return (
        "In some of these steps the scale changes: divide p.grad itself, not a copy, by the scale "
        "that this step's loss was multiplied with. In some a gradient is not finite: there the "
        "optimizer takes no step."
    )


def judge_clip(case: Case) -> Iterator[Finding]:
    """`max_norm` limits the norm of the true (unscaled) gradient."""

    def explain(case: Case) -> str:
        if _is_mistake(case, "clips each"):
            return "Each parameter was clipped for itself: max_norm limits one norm, over all."
        if _is_mistake(case, "clips groups"):
            return (
                "Each parameter group was clipped for itself: max_norm limits one norm, over all."
            )
        if _is_mistake(case, "clips values"):
            return "Each number was clipped for itself: max_norm limits the norm, over all."
        return (
            f"max_norm is {case.inputs[0]['max_norm']:.4g}, a limit for the true gradient: divide "
            "every p.grad by the scale first, and then clip."
        )

    return _judge_scaled(case, explain, with_scales=False)
