"""One training run, written once: by one process on the whole batch, or by ranks on shares of it.

`train(Plain(), ...)` is the oracle. `train(Stage1(), ...)` and so on have to end with the same
parameters.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.data import make_tokens
from minidist.model import GPT, GPTConfig, lm_loss

BATCH = 12  # divides by 1, 2, 3 and 4
STEPS = 4


class Plain:
    """One process, stock torch."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.optimizer: Any = None

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def optimize(self, params: Any, optimizer_class: Any, **kwargs: Any) -> Any:
        self.optimizer = optimizer_class(params, **kwargs)
        return self.optimizer

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        if not dist.is_initialized():
            return batch
        return batch.chunk(dist.get_world_size())[dist.get_rank()]

    def clip(self, model: nn.Module, max_norm: float, norm_type: float) -> float:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).item()

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def values(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class Gpt(nn.Module):
    """A GPT whose sizes divide by nothing, in float64, and its loss."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        shape = {"vocab_size": 13, "context": 5, "width": 6, "num_layers": 2, "num_heads": 2}
        self.gpt = GPT(GPTConfig(**(shape | {"mlp_ratio": 3} | config)))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return lm_loss(self.gpt(inputs), targets)

    @property
    def blocks(self) -> Any:
        return self.gpt.blocks

    @staticmethod
    def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        inputs, targets = make_tokens(BATCH * steps, 5, 13, seed=3)
        return list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))


class Sometimes(nn.Module):
    """`some` is used by three samples only, `never` by none, `frozen` is used and not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.some = nn.Linear(5, 5)
        self.never = nn.Linear(7, 3)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        h = self.frozen(torch.tanh(self.first(x)))
        if flag.any():
            h = h + flag * self.some(h)
        return self.last(torch.tanh(h)).square().mean()

    @property
    def blocks(self) -> Any:
        return [self.first, self.frozen]

    @staticmethod
    def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(5)
        flag = (torch.arange(BATCH) < 3).double()[:, None]
        return [
            (torch.randn(BATCH, 3, generator=generator, dtype=torch.float64), flag)
            for _ in range(steps)
        ]


class Tiny(nn.Module):
    """One parameter of three elements: less than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) - 1).square().mean()

    @property
    def blocks(self) -> Any:
        return []

    batches = staticmethod(Sometimes.batches)


class Frozen(Gpt):
    """Tied embeddings that are not trained, nor are the first block's attention and a norm."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        block: Any = self.gpt.blocks[0]
        for part in (self.gpt.token_embedding, block.attention, self.gpt.norm):
            part.requires_grad_(False)


MODELS = {"gpt": Gpt, "frozen": Frozen, "sometimes": Sometimes, "tiny": Tiny}


def build(model: str = "gpt", **config: Any) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model](**config).double()


def train(
    engine: Plain,
    *,
    model: str = "gpt",
    config: dict[str, Any] | None = None,
    optimizer: str = "AdamW",
    hyper: dict[str, Any] | None = None,
    schedule: bool = False,
    closure: bool = False,
    clip: tuple[float, float] | None = None,
    accumulate: int = 1,
    skip_sync: bool = False,
    groups: bool = False,
    add_group: bool = False,
    steps: int = STEPS,  # a group is added after two
    start: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Some steps; the losses, norms, parameters and optimiser state at the end."""
    net: Any = build(model, **(config or {}))
    if start is not None:
        net.load_state_dict(start["values"])
    run = engine.wrap(net)
    optimizer_class = getattr(torch.optim, optimizer)
    # A large eps: the gradient of a key bias is zero but for rounding, and Adam divides by it.
    hyper = hyper or {"lr": 0.02, "eps": 1e-4}
    params = list(net.parameters())
    late = []
    if add_group:
        params, late = params[:-2], params[-2:]
    listed: Any = params
    if groups:  # no weight decay for biases and norms, and iterators, as `layer.parameters()` is
        listed = [
            {"params": (p for n, p in net.named_parameters() if "bias" not in n)},
            {"params": (p for n, p in net.named_parameters() if "bias" in n), "weight_decay": 0.3},
        ]
    opt = engine.optimize(listed, optimizer_class, **hyper)
    if start is not None:
        engine.load_optimizer_state(start["optimizer"])
    scheduler = None
    if schedule:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=steps + 1)
    losses, norms = [], []
    first = 0 if start is None else start["steps"]
    for step, batch in enumerate(net.batches(10)[first : first + steps]):
        if add_group and step == 2:
            opt.add_param_group({"params": iter(late), "lr": 0.01})
        share = [engine.share(part) for part in batch]

        def backward(share: Any = share) -> torch.Tensor:
            opt.zero_grad()
            total = torch.zeros(())
            micro = list(zip(*(part.chunk(accumulate) for part in share), strict=True))
            for i, inputs in enumerate(micro):
                is_last = i == len(micro) - 1
                with contextlib.nullcontext() if is_last or not skip_sync else engine.no_sync():
                    loss = run(*inputs) / len(micro)
                    loss.backward()
                total = total + loss.detach()
            return total

        if closure:
            losses.append(opt.step(backward))
        else:
            losses.append(backward())
            if clip:
                norms.append(engine.clip(net, *clip))
            opt.step()
        if scheduler is not None:
            scheduler.step()
    return {
        "losses": torch.stack(losses),
        "norms": norms,
        "values": engine.values(net),
        "optimizer": engine.optimizer_state(),
        "steps": first + steps,
    }


def compare(got: list[dict[str, Any]], expected: dict[str, Any], rtol: float = 1e-9) -> None:
    """Every rank's result against the oracle's; losses are the mean over ranks."""
    torch.testing.assert_close(
        torch.stack([each["losses"] for each in got]).mean(0), expected["losses"], rtol=rtol, atol=0
    )
    for each in got:
        assert each["norms"] == [float_close(norm, rtol) for norm in expected["norms"]]
        assert list(each["values"]) == list(expected["values"])
        for name, value in expected["values"].items():
            torch.testing.assert_close(
                each["values"][name],
                value,
                rtol=rtol,
                atol=1e-12,
                msg=lambda m, n=name: f"{n}: {m}",
            )


def float_close(value: float, rtol: float) -> Any:
    import pytest

    return pytest.approx(value, rel=rtol)


def compare_optimizer(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two state dicts of torch optimisers: the same groups and the same state."""
    assert [g["params"] for g in got["param_groups"]] == [
        g["params"] for g in expected["param_groups"]
    ]
    assert set(got["state"]) == set(expected["state"])
    for number, state in expected["state"].items():
        assert set(got["state"][number]) == set(state)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(got["state"][number][key], value, rtol=1e-8, atol=1e-14)
