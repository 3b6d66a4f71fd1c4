"""Criterion for stages of other kinds: tokens in, frozen parameters, float64 on the way.

The stages' outputs and the gradients of their inputs are not contiguous. gloo and NCCL refuse to
send such a tensor, or to receive into one; the emulated cluster does not: see `_refusing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from autograder.criteria.bonus_pipeline import parts
from autograder.criteria.bonus_pipeline.plan import gpipe_of
from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from minidist.emulate.group import EmulatedGroup

VOCABULARY, TOKENS = 11, 3


def draw_tokens(draw: Draw) -> list[Values]:
    """Integers (int32) for an embedding in the first stage; float64 between the stages."""
    n = draw.world_size
    inputs = parts.draw_stages(draw, [VOCABULARY] * (n + 1))
    m = n + 1
    parts.add_case(inputs, draw, [gpipe_of(m)] * n, [2] * m)
    rng = draw.shared("tokens")
    shape = (2 * m, TOKENS)
    inputs[0]["x/0"] = rng.integers(0, VOCABULARY, shape, dtype=np.int32)
    inputs[-1]["y/0"] = rng.integers(0, VOCABULARY, shape)
    return inputs


class _TokenStage(nn.Module):
    """A layer in float64 on each rank, and before the first one a frozen embedding.

    The layer is `parts.Stage` as a convolution of width 1 over the tokens. The embedding is the
    first stage's first parameter, in float32: stages need not have one dtype.
    """

    def __init__(self, values: Values, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY) if is_first else None
        self.linear = parts.Stage(values["w"], values["b"], is_last)
        if self.embedding is not None:
            with torch.no_grad():
                eye = torch.eye(VOCABULARY)
                self.embedding.weight.copy_(eye + 0.1 * eye.roll(1, 0))
            self.embedding.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None and not x.is_floating_point():
            x = self.embedding(x).double()
        own, tokens_last = self.linear, x.mT.contiguous()
        y = nn.functional.conv1d(tokens_last, own.weight.unsqueeze(-1), own.bias).contiguous()
        return (y if own.is_last else torch.tanh(y)).mT


def _refusing(as_it_is: Callable[..., Any], what: str) -> Callable[..., Any]:
    """`EmulatedGroup.send` or `.recv`, which raises gloo's error for a tensor that gloo refuses."""

    def checked(group: Any, tensors: Any, *where: Any, **options: Any) -> Any:
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise RuntimeError(
                "input tensor has to be contiguous: a stage's output need not be (nor an "
                f"empty_like of it), and {what} has to be"
            )
        return as_it_is(group, tensors, *where, **options)

    return checked


_send = _refusing(EmulatedGroup.send, "what is sent")
_recv = _refusing(EmulatedGroup.recv, "what is received into")


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _one_hot(tokens: list[torch.Tensor], width: int) -> list[torch.Tensor]:
    return [nn.functional.one_hot(each.long(), width).double() for each in tokens]


def observe_tokens(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """The gradients of a stage; the first stage has an embedding. Then a call without tokens.

    Also whether parameters and inputs that require no gradient have none.
    """
    is_last = context.rank == context.world_size - 1
    stage = _TokenStage(inputs, context.rank == 0, is_last).to(context.device)
    given = list(parts.arguments(stage, inputs, context, 0))
    sizes, width = inputs["cases"][0]["sizes"], inputs["w"].shape[1]

    def buffer(i: int) -> torch.Tensor:
        return torch.zeros(sizes[i], TOKENS, width, dtype=torch.float64, device=context.device)

    given[4:] = [_token_loss, None if context.rank == 0 else buffer]
    with mock.patch.multiple(EmulatedGroup, send=_send, recv=_recv):
        run_pipeline(*given)
    answer = parts.gradients_of(stage, 0)
    answer["frozen"] = all(p.grad is None for p in stage.parameters() if not p.requires_grad)
    again = parts.arguments(stage, inputs, context, 0)
    ends = [tokens and _one_hot(tokens, width) for tokens in again[2:4]]
    run_pipeline(stage, again[1], *ends, oracle.mse, given[5])
    answer["inputs"] = all(x.grad is None for x in ends[0] or [])
    return answer


def judge_tokens(case: Case) -> list[Finding]:
    """The gradients are those of one process in float64, up to a common factor.

    Tensors that require no gradient have none: a `.grad` of zeros would make AdamW decay a frozen
    weight, and the `.grad` of an input would take memory as long as the batch exists.
    """
    n = case.world_size
    stages = [
        _TokenStage(values, rank == 0, rank == n - 1) for rank, values in enumerate(case.inputs)
    ]
    h = torch.from_numpy(case.inputs[0]["x/0"])
    for stage in stages:
        h = stage(h)
    _token_loss(h, torch.from_numpy(case.inputs[-1]["y/0"])).backward()
    expected = [parts.gradients_of(stage, 0)["g/0"] for stage in stages]
    findings = parts.judge_direction(
        case,
        0,
        "tokens in, an embedding in the first stage",
        expected,
        oracle.RTOL["float64"],
        one_factor=False,
    )
    for name, what in (
        ("frozen", "a frozen parameter has a .grad afterwards. In a single process it has None"),
        ("inputs", "an input of the first stage has a .grad afterwards, which nobody wants"),
    ):
        if not findings and case.answers[0].get(name) is not True:
            findings.append(Finding(f"{what}.", 0))
    return findings
