"""Criteria for DDP written from scratch: values, on a real process group.

Every rank computes gradients on data of its own, so the right mean on every rank proves that the
gradients were exchanged. All criteria but the first two start from the same weights on every rank,
so that a mistake in broadcasting costs no points there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import oracle, weights
from autograder.criteria.common.answers import read_array, same_array
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs, per_rank

SIZES = (6, 9, 5, 3)
BATCH = 5
SMALL_CAP_MB = 0.0002  # about 200 bytes: several buckets, some with one parameter


def tensors(inputs: Values, context: Context, *names: str) -> list[torch.Tensor]:
    """The inputs of these names, on the rank's device."""
    return [torch.from_numpy(inputs[name]).to(context.device) for name in names]


def step_once(ddp: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """One forward, backward and synchronisation."""
    oracle.mse(ddp(x), y).backward()
    ddp.finish_gradient_synchronization()


def place(module: Any, context: Context) -> Any:
    """The module on the rank's device; on a GPU its memory is contiguous.

    NCCL refuses tensors that are not contiguous, gloo does not: nobody loses points on a GPU for a
    mistake that a CPU does not show.
    """
    module.to(context.device)
    if context.device.type != "cpu":
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.contiguous()
    return module


# --- what wrapping does --------------------------------------------------------------------------


class Normed(nn.Module):
    """A network with a frozen parameter and three buffers: float, integer, and not persistent.

    The frozen parameter is stored as its transpose; channels_last is such a case in practice.
    """

    def __init__(self, inputs: Values) -> None:
        super().__init__()
        self.net = oracle.mlp(inputs)
        transpose = torch.from_numpy(inputs["frozen"].T.copy())
        self.frozen = nn.Parameter(transpose.t(), requires_grad=False)
        for name in ("running_mean", "num_batches", "mask"):
            value = torch.from_numpy(np.array(inputs[name]))
            self.register_buffer(name, value, persistent=name != "mask")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@per_rank
def draw_wrapping(rng: np.random.Generator) -> Values:
    """Every rank starts from different parameters and buffers."""
    return (
        oracle.draw_parameters(rng, SIZES)
        | oracle.draw_batch(rng, BATCH, SIZES)
        | {
            # `frozen` and `num_batches` lose digits if they travel as float32.
            "frozen": rng.normal(size=(2, 3)),
            "running_mean": rng.normal(size=7).astype(np.float32),
            "num_batches": rng.integers(2**40, 2**41, size=()),
            "mask": rng.normal(size=(2, 3)).astype(np.float32),
        }
    )


def observe_wrapping(ddp_class: Any, inputs: Values, context: Context) -> Values:
    """Parameters, buffers and one output after wrapping."""
    module = place(Normed(inputs), context)
    ddp = ddp_class(module)
    (x,) = tensors(inputs, context, "x")
    answer: Values = {"output": read_array(ddp(x), "ddp(x)")}
    for i, p in enumerate(module.net.parameters()):
        answer[f"p{i}"] = p.detach().cpu().numpy()
    answer["frozen"] = module.frozen.detach().cpu().numpy()
    for name, buffer in module.named_buffers():
        answer[f"buffer {name}"] = buffer.detach().cpu().numpy()
    return answer


def judge_weights(case: Case) -> Iterator[Finding]:
    """Parameters equal rank 0's, and calling the wrapper runs the module with these parameters.

    The wrapper may be an nn.Module or not.
    """
    start = oracle.parameters_of(case.inputs[0])
    model = oracle.mlp(case.inputs[0], torch.float64)
    for rank, answer in enumerate(case.answers):
        for i, expected in enumerate(start):
            hint = "Broadcast every parameter from rank 0 in __init__."
            what = f"parameter {i} after wrapping"
            if wrong := oracle.differs(rank, what, answer.get(f"p{i}"), expected, hint=hint):
                yield wrong
                break
        else:
            x = torch.from_numpy(case.inputs[rank]["x"]).double()
            output = model(x).detach().numpy()
            if wrong := oracle.differs(rank, "ddp(x)", answer.get("output"), output):
                yield wrong
            if same_array(answer.get("frozen"), case.inputs[0]["frozen"].astype(np.float32)):
                yield Finding("a float64 parameter was rounded to float32 on its way.", rank)
            elif wrong := oracle.differs(
                rank,
                "a frozen parameter after wrapping",
                answer.get("frozen"),
                case.inputs[0]["frozen"],
                dtype="float64",
                hint="It is frozen, and a transpose, so not contiguous: broadcast it, too. Whoever "
                "broadcasts a contiguous copy has to copy the result back.",
            ):
                yield wrong


def judge_buffers(case: Case) -> Iterator[Finding]:
    """Buffers equal rank 0's.

    If parameters were rounded to float32, which `judge_weights` judges, buffers may be, too.
    """
    for rank, answer in enumerate(case.answers):
        in_floats = same_array(answer.get("frozen"), case.inputs[0]["frozen"].astype(np.float32))
        for name in ("running_mean", "num_batches", "mask"):
            expected = np.asarray(case.inputs[0][name])
            if wrong := differs(
                rank,
                f"buffer {name} after wrapping",
                answer.get(f"buffer {name}"),
                expected.astype(np.float32) if in_floats else expected,
                rtol=0.0,
                atol=0.0,
                hint="Buffers (BatchNorm's statistics, say) are part of the model: broadcast them.",
            ):
                yield wrong


# --- gradients -----------------------------------------------------------------------------------

STEPS = 3
EVAL_STEP = 2 * STEPS - 1  # the last step runs in eval(), which changes no gradient


def draw_gradients(draw: Draw) -> list[Values]:
    """The same weights on all ranks; different data per rank and step."""
    start = oracle.draw_parameters(draw.shared(), SIZES)
    inputs = []
    for rank in range(draw.world_size):
        rng, values = draw.private(rank), dict(start)
        for step in range(2 * STEPS):
            batch = oracle.draw_batch(rng, BATCH, SIZES)
            values |= {f"x/{step}": batch["x"], f"y/{step}": batch["y"]}
        inputs.append(values)
    return inputs


def observe_gradients(ddp_class: Any, inputs: Values, context: Context) -> Values:
    """Gradients of several steps, with one bucket and with many, zeroed to None and to zeros."""
    answer: Values = {}
    for run, cap in enumerate((25.0, SMALL_CAP_MB)):
        module = oracle.mlp(inputs).to(context.device)
        ddp = ddp_class(module, bucket_cap_mb=cap)
        for step in range(run * STEPS, (run + 1) * STEPS):
            x, y = tensors(inputs, context, f"x/{step}", f"y/{step}")
            getattr(ddp, "train", module.train)(step != EVAL_STEP)
            step_once(ddp, x, y)
            for i, p in enumerate(module.parameters()):
                answer[f"g{step}/{i}"] = oracle.grad_of(p).copy()
            module.zero_grad(set_to_none=step % 2 == 0)
    return answer


def judge_gradients(case: Case) -> Iterator[Finding]:
    """Every gradient is the mean over ranks, in every step.

    It may be divided before it travels or after; p.grad may be the old tensor, a new one, a view.
    """

    def local(rank: int, step: int) -> list[np.ndarray]:
        return oracle.gradients(
            case.inputs[rank], case.inputs[rank][f"x/{step}"], case.inputs[rank][f"y/{step}"]
        )

    return judge_steps(
        case,
        2 * STEPS,
        local,
        lambda step: (
            f"step {step % STEPS}{', after eval()' if step == EVAL_STEP else ''}, "
            f"bucket_cap_mb={25.0 if step < STEPS else SMALL_CAP_MB}"
        ),
    )


def judge_steps(
    case: Case,
    steps: int,
    local: Callable[[int, int], list[np.ndarray]],
    describe: Callable[[int], str],
    plain: Sequence[int] = (),
) -> Iterator[Finding]:
    """Findings for ranks whose gradients are not as they should be in one of the steps.

    Args:
        local: the gradients of a rank in a step.
        plain: numbers of parameters that show what else is wrong with this DDP (see `shares_of`).
    """
    ranks = range(case.world_size)
    grads = [[local(rank, step) for rank in ranks] for step in range(steps)]
    shares = shares_of(
        [[[g[r][i] for g in grads] for i in plain] for r in ranks],
        [[[case.answers[r].get(f"g{s}/{i}") for s in range(steps)] for i in plain] for r in ranks],
    )
    wrong_ranks: set[int] = set()
    for step in range(steps):
        for rank in set(ranks) - wrong_ranks:
            for i, own in enumerate(grads[step][rank]):
                expected = combine(shares[rank], [g[i] for g in grads[step]])
                got = case.answers[rank].get(f"g{step}/{i}")
                hint = oracle.explain_gradient(got, expected, own, case.world_size)
                what = f"{describe(step)}: gradient of parameter {i}"
                if wrong := oracle.differs(rank, what, got, expected, hint=hint):
                    yield wrong
                    wrong_ranks.add(rank)
                    break


def shares_of(
    own: Sequence[Sequence[Sequence[np.ndarray]]], got: Sequence[Sequence[Sequence[Any]]]
) -> np.ndarray:
    """The weight of each rank's gradient on each rank: 1/W, or the weight in plain parameters.

    A DDP that divides by a wrong number loses `ddp_gradients`, but nothing where tied, frozen or
    unused parameters are judged: these only have to get the same weights as plain parameters.

    Args:
        own, got: per rank, plain parameter and step, a rank's own gradient and its answer.

    Returns:
        [W, W]. 1/W everywhere if most ranks did not get a part of every rank's gradient, or if they
        got plain sums: never dividing misses the lab's idea, and no other test shows that mistake.
    """
    num_ranks = len(own)
    mean = np.full(num_ranks, 1 / num_ranks)
    columns = [[g for steps in rank for g in steps] for rank in own]
    rows = []
    for rank in got:
        row = weights.weights_of(columns, [g for steps in rank for g in steps]) if rank else None
        if row is None or np.allclose(row, mean, rtol=1e-3):
            row = mean
        rows.append(np.where(np.abs(row) < 1e-4 * np.abs(row).max(), 0.0, row))
    parts = sum(
        len(weights.present(row)) == num_ranks and not np.allclose(row, 1.0, rtol=1e-3)
        for row in rows
    )
    return np.stack(rows if 2 * parts > num_ranks else [mean] * num_ranks)


def combine(shares: np.ndarray, gradients: Sequence[np.ndarray]) -> np.ndarray:
    """What a rank's gradient must be: the sum of all ranks' gradients, each with its share."""
    return np.tensordot(shares, np.stack(gradients), axes=1)
