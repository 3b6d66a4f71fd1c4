"""Criteria for FSDP from scratch: outputs and gradients.

They run on the emulated cluster: there, a result arrives only when it is waited for, and if ranks
begin different collectives, an error names them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import as_number, item_of, read_tensor, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab3_fsdp import parts

SIZES = (40, 64, 47, 23)
BATCH = 5
ONE_UNIT = ((2, 3), (1, 1))  # layers; the second one has fewer numbers than there are ranks
CONTEXT, VOCABULARY = 7, 29
PASSES = 4  # forward passes of `observe_forward`


# --- the small transformer -----------------------------------------------------------------------


def _empty_gpt() -> nn.Module:
    from minidist.model import GPT, GPTConfig

    return GPT(
        GPTConfig(vocab_size=VOCABULARY, context=CONTEXT, width=16, num_layers=2, num_heads=2)
    )


def _gpt(values: Values, dtype: torch.dtype = torch.float32) -> nn.Module:
    gpt = _empty_gpt().to(dtype)
    with torch.no_grad():
        for i, p in enumerate(gpt.parameters()):
            p.copy_(torch.from_numpy(values[f"p{i}"]))
    return gpt


def _gpt_units(gpt: Any) -> list[nn.Module]:
    return [gpt.token_embedding, gpt.position_embedding, *gpt.blocks, gpt.norm, gpt.head]


def _draw_gpt(rng: np.random.Generator) -> Values:
    shapes = [tuple(p.shape) for p in _empty_gpt().parameters()]
    return {f"p{i}": value for i, value in enumerate(parts.distinct(rng, shapes))}


def _tokens(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(VOCABULARY, size=(3, CONTEXT + 1))


def _documents(rng: np.random.Generator) -> np.ndarray:
    """Each row's documents: two of them, of which the second begins somewhere inside."""
    begins = rng.integers(2, CONTEXT - 1, size=(3, 1))
    return (np.arange(CONTEXT) >= begins).astype(np.int64)


def _more_arguments(inputs: Values, call: int) -> list[torch.Tensor]:
    """What the transformer gets beside the tokens: documents, in the second call."""
    return [torch.from_numpy(inputs["documents"])] if call == 1 else []


def _token_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = read_tensor(model(tokens[:, :-1]), "fsdp(x)")
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# --- the network of linear layers ---------------------------------------------------------------


def draw_mlp(draw: Draw) -> list[Values]:
    """The same model on all ranks; two batches of different data on each rank."""
    start = parts.draw_mlp(draw.shared(), SIZES)
    return oracle.private_batches(draw, start, [(BATCH,)] * 2, SIZES)


# --- forward -------------------------------------------------------------------------------------


def draw_forward(draw: Draw) -> list[Values]:
    """The same transformer, and factor for its shards, on all ranks; different tokens per rank."""
    rng = draw.shared()
    start = _draw_gpt(rng) | {"factor": float(rng.uniform(0.5, 0.9))}
    return [
        start | {f"t{i}": _tokens(own) for i in range(2)} | {"documents": _documents(own)}
        for own in map(draw.private, range(draw.world_size))
    ]


def observe_forward(fsdp_class: Any, inputs: Values, context: Context) -> Values:
    """Logits of the transformer before and after changes of its shards, in eval mode.

    The first passes are under no_grad; the others build graphs that nobody goes backward through. A
    unit that stays whole shows in the next pass, because the values of its shards have changed.
    """
    gpt = _gpt(inputs).to(context.device)
    fsdp = fsdp_class(gpt, _gpt_units(gpt))
    answer: Values = {"trains": False, "stays": False}
    if isinstance(fsdp, nn.Module):
        fsdp.eval()
        answer["trains"] = gpt.training
        fsdp.train()
        answer["stays"] = not gpt.training
        fsdp.eval()
    gpt.eval()
    for i in range(PASSES):
        tokens = torch.from_numpy(inputs[f"t{i % 2}"]).to(context.device)
        more = [t.to(context.device) for t in _more_arguments(inputs, i)]
        with torch.set_grad_enabled(i >= PASSES // 2), parts.naming_faults():
            output = read_tensor(fsdp(tokens[:, :-1], *more), "fsdp(x)")
            answer[f"o{i}"] = output.detach().cpu().numpy()
        with torch.no_grad():
            for p in parts.local_parameters(fsdp):
                p.mul_(inputs["factor"])
    return answer


def judge_forward(case: Case) -> Iterator[Finding]:
    """The logits equal those of the whole model with the current values of the shards.

    A class may keep all units until their backward: different criteria judge its memory.
    """
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        if told(answer, "trains"):
            yield Finding(
                "fsdp.eval() does not reach the model, so dropout would go on: the model has to be "
                "a module of the FSDP (self.model = model).",
                rank,
            )
            continue
        if told(answer, "stays"):
            yield Finding(
                "fsdp.train() after fsdp.eval() does not reach the model: it stays in eval mode, "
                "and is trained without its dropout.",
                rank,
            )
            continue
        for i in range(PASSES):
            got, more = answer.get(f"o{i}"), _more_arguments(inputs, i)
            expected = _logits(inputs, i, i)
            if i > PASSES // 2 and not oracle.differs(rank, "", got, _logits(inputs, i, i - 1)):
                continue
            what = "the model's output" + " after the shards have changed" * (i > 0)
            what += ", for fsdp(tokens, documents)" * bool(more)
            what += ", under no_grad()" if i < PASSES // 2 else ", with a graph"
            hint = (
                "Forward frees and gathers each unit each time, also in eval mode, and hands on "
                "all its arguments: does it read the shards' values of now?"
            )
            if more and oracle.agrees(got, _logits(inputs, i, i, documents=False)):
                hint = "That is the output for the tokens alone: hand on all arguments."
            elif any(oracle.agrees(got, _logits(inputs, i, j)) for j in range(i)):
                hint = (
                    "That is the output with values that the shards had before: units stayed "
                    "whole, or something else than the shard of now was gathered."
                )
            if wrong := oracle.differs(
                rank,
                what,
                got,
                expected,
                hint=hint if i else "Does each gathered value end up in its place?",
            ):
                yield wrong
                break


def _logits(inputs: Values, call: int, changes: int, *, documents: bool = True) -> np.ndarray:
    """The whole model's output for the tokens of a call, after `changes` changes of the shards."""
    now = {k: v * inputs["factor"] ** changes for k, v in inputs.items() if k[0] == "p"}
    tokens = torch.from_numpy(inputs[f"t{call % 2}"])[:, :-1]
    with torch.no_grad():
        more = _more_arguments(inputs, call) if documents else []
        return _gpt(now, torch.float64)(tokens, *more).numpy()


# --- gradients -----------------------------------------------------------------------------------


def _record(shards: Sequence[torch.Tensor]) -> Values:
    """The values of each shard and, if it has one, its gradient."""
    answer: Values = {}
    for i, p in enumerate(shards):
        answer[f"s{i}"] = parts.array_of(p)
        if p.grad is not None:
            answer[f"g{i}"] = parts.array_of(p.grad)
    return answer


def observe_gradients(fsdp_class: Any, inputs: Values, context: Context) -> Values:
    """One backward pass of the transformer.

    No code of the student's runs after it: when backward() returns, all gradients must be there.
    """
    gpt = _gpt(inputs).to(context.device)
    for name in list(gpt._modules)[::-1]:  # the units are not in the order of the modules
        gpt._modules[name] = gpt._modules.pop(name)
    fsdp = fsdp_class(gpt, _gpt_units(gpt))
    shards = parts.local_parameters(fsdp)
    tokens = torch.from_numpy(inputs["t0"]).to(context.device)
    with parts.naming_faults():
        _token_loss(fsdp, tokens).backward()
    return _record(shards) | {"one": [_of_one_unit(fsdp_class, context, s) for s in ONE_UNIT]}


def _of_one_unit(fsdp_class: Any, context: Context, sizes: tuple[int, int]) -> float:
    """The gradient's sum over this rank's shards, of a model that is one linear layer."""
    model = nn.Sequential(nn.Linear(*sizes, bias=min(sizes) > 1)).to(context.device)
    fsdp = fsdp_class(model, list(model))
    shards = parts.local_parameters(fsdp)
    fsdp(torch.full((2, sizes[0]), 1.0 + context.rank, device=context.device)).sum().backward()
    return sum(float(parts.array_of(p.grad).sum()) for p in shards if p.grad is not None)


def judge_gradients(case: Case) -> Iterator[Finding]:
    """Each shard's gradient is its part of the mean over ranks."""
    per_rank, names = [], [name for name, _ in _empty_gpt().named_parameters()]
    for inputs in case.inputs:
        gpt = _gpt(inputs, torch.float64)
        _token_loss(gpt, torch.from_numpy(inputs["t0"])).backward()
        per_rank.append([oracle.grad_of(p) for p in gpt.parameters()])
    findings = _judge_gradients(case, names, per_rank)
    yield from findings
    for number, (width, height) in enumerate(ONE_UNIT) if not findings else ():
        # Each weight has the sum of its inputs over 2 rows as gradient, each bias 2.
        weights, biases = width * height, height if min(width, height) > 1 else 0
        mean = (case.world_size + 1) / 2  # of the ranks' inputs, 1 + rank
        right = 2 * (weights * mean + biases)
        one = [item_of(told(answer, "one"), number) for answer in case.answers]
        found = sum(as_number(value) or 0.0 for value in one)
        if abs(found - right) > 1e-3 * right:
            yield Finding(
                f"a model that is a single unit of {weights + biases} numbers: the gradients in "
                f"the ranks' shards add up to {found:.4g}, expected {right:.4g}. Is the first "
                "unit's reduce-scatter waited for, also where it is the last one?"
            )
            return


def observe_accumulate(fsdp_class: Any, inputs: Values, context: Context) -> Values:
    """Gradients of each batch alone, and of three passes without zero_grad() between them.

    zero_grad() comes right before the first backward, as in many training loops; the last one
    leaves zeros. The last pass is in eval mode, which changes nothing here.

    Whole gradients are deleted here: `fsdp_shards` judges whether they stay.
    """
    model = oracle.mlp(inputs).to(context.device)
    fsdp = fsdp_class(model, parts.linears(model))
    optimizer = torch.optim.SGD(parts.local_parameters(fsdp), lr=0.1)
    answer: Values = {}
    for name, calls in (("first", (0,)), ("both", (0, 1, 1)), ("second", (1,))):
        if name == "second":
            model.eval()
            if isinstance(fsdp, nn.Module):
                fsdp.eval()
        for number, call in enumerate(calls):
            x, y = (torch.from_numpy(inputs[f"{n}/{call}"]).to(context.device) for n in "xy")
            with parts.naming_faults():
                loss = oracle.mse(read_tensor(fsdp(x), "fsdp(x)"), y)
                if number == 0:
                    optimizer.zero_grad(set_to_none=name != "second")
                loss.backward()
            parts.forget_whole_gradients(model, fsdp)
        grads = [p.grad for p in parts.local_parameters(fsdp)]
        answer |= {f"{name}/{i}": parts.array_of(g) for i, g in enumerate(grads) if g is not None}
    return answer


def judge_accumulate(case: Case) -> Iterator[Finding]:
    """The gradients of all passes together are the sum of each pass's, shard by shard."""
    size = sum(v.size for v in oracle.parameters_of(case.inputs[0]))
    for rank, answer in enumerate(case.answers):
        keys = [k.removeprefix("both/") for k in answer if k.startswith("both/")]
        if not any(np.size(answer[f"both/{key}"]) for key in keys):
            why = "the shards have no gradients after backward."
            if any(k.startswith("first/") for k in answer):
                why = (
                    "the first backward gave the shards gradients, three more after zero_grad() "
                    "gave none: does what backward counts start over?"
                )
            yield Finding(why, rank)
        for key in keys:
            first, second = (parts.floats_of_shard(answer.get(f"{n}/{key}"), size) for n in _ALONE)
            if first is None or second is None or first.shape != second.shape:
                yield Finding(
                    "after zero_grad() and a backward a shard has no gradient, or one that is not "
                    "finite.",
                    rank,
                )
                break
            if first.size and (not first.any() or np.array_equal(first, second)):
                yield Finding("other data gave the same gradient, or none.", rank)
                break
            got = parts.floats_of_shard(answer[f"both/{key}"], size)
            scale = max(np.abs(first).max(initial=0), np.abs(second).max(initial=0))
            if got is None or got.shape != first.shape:
                yield Finding("after three backward passes: not finite numbers.", rank)
                break
            together = first + 2 * second
            off = np.abs(got - together) > 1e-4 * scale
            if off.any():
                why = (
                    "Is anything left over from before zero_grad(), which here comes between the "
                    "first forward and its backward, or is anything added twice?"
                )
                if max(scale, np.abs(got).max(initial=0)) > NO_GRADIENT:
                    why = _NOT_ARRIVED
                elif np.allclose(got, second, rtol=1e-3, atol=1e-4 * scale):
                    why = "That is the last one's alone: add to the shard's gradient."
                elif np.allclose(got, first + second, rtol=1e-3, atol=1e-4 * scale):
                    why = "One is missing: the third backward replaced what the second had added."
                yield Finding(
                    f"after three backward passes without zero_grad(): expected "
                    f"{together[off][0]:.6g}, the sum of their gradients, got "
                    f"{got[off][0]:.6g}. {why}",
                    rank,
                )
                break


_ALONE = ("first", "second")
NO_GRADIENT = 1e6  # far above any gradient here
_NOT_ARRIVED = (
    "That is no gradient but what lay in memory: is each reduce-scatter waited for before its "
    "result is used?"
)


def _judge_gradients(
    case: Case, names: list[str], per_rank: list[list[np.ndarray]]
) -> list[Finding]:
    """Compares the gradients of all shards to the mean over ranks, entry by entry."""
    mean = [oracle.mean(grads) for grads in zip(*per_rank, strict=True)]
    flat = np.concatenate([g.ravel() for g in mean])
    local = [np.concatenate([g.ravel() for g in grads]) for grads in per_rank]
    owner = np.repeat(np.arange(len(mean)), [g.size for g in mean])
    # The tolerance has an absolute part per parameter, and one for gradients that should be 0.
    scale = np.array([np.abs(g).max() for g in mean])[owner] + 1e-2 * np.abs(flat).max()
    params = [case.inputs[0][f"p{i}"] for i in range(len(mean))]
    values, order = parts.lookup(names, params)
    seen = np.zeros(len(flat), dtype=bool)
    findings: list[Finding] = []
    for rank, answer in enumerate(case.answers):
        for key in (k for k in answer if k.startswith("s")):
            shard = parts.floats_of_shard(answer[key], flat.size)
            grad = parts.floats_of_shard(answer.get("g" + key[1:]), flat.size)
            if shard is None or grad is None or grad.shape != shard.shape:
                findings.append(
                    Finding(
                        "when backward() returns, a shard has no gradient of its own shape, or "
                        "one that is not finite. Is each reduce-scatter waited for, and are units "
                        "taken in the order of the list? (The model has them in another one here.)",
                        rank,
                    )
                )
                break
            places = parts.find(values, order, shard)
            real, place = grad[places >= 0], places[places >= 0]
            seen[place] = True
            if grad[places < 0].any():
                findings.append(
                    Finding(
                        "where a shard is filled up with zeros its gradient is not 0: a norm over "
                        "the shards would be wrong, and the filling would move.",
                        rank,
                    )
                )
                break
            off = np.abs(real - flat[place]) > 2e-4 * (np.abs(flat[place]) + scale[place]) + 1e-12
            if off.any():
                at = place[off][0]
                hint = _explain(real, place, flat, local[rank], case)
                findings.append(
                    Finding(
                        f"the gradient of {names[owner[at]]}: expected {flat[at]:.6g} (mean over "
                        f"ranks) at entry {int(at - np.flatnonzero(owner == owner[at])[0])}, got "
                        f"{real[off][0]:.6g}. {hint}",
                        rank,
                    )
                )
                break
    if not findings and not seen.all():
        missing = sorted({names[i] for i in owner[~seen]})
        findings.append(Finding(f"{missing[0]}: some of its entries are in no rank's shards."))
    return findings


def _explain(
    got: np.ndarray, place: np.ndarray, mean: np.ndarray, local: np.ndarray, case: Case
) -> str:
    n = case.world_size

    def agrees(expected: np.ndarray) -> bool:
        return bool(np.allclose(got, expected[place], rtol=1e-3, atol=1e-4 * np.abs(mean).max()))

    if not np.abs(got).max(initial=0) <= NO_GRADIENT:
        return _NOT_ARRIVED
    if n > 1 and agrees(mean * n):
        return f"That is {n} times the mean: the gradients were summed, not averaged."
    if n > 1 and agrees(mean / n):
        return "That is the mean divided by the number of ranks once more."
    if n > 1 and agrees(local):
        return "That is this rank's own gradient: it was never reduced over the ranks."
    if n > 2 and agrees(mean * n / 2):
        return "That is the sum divided by 2: is the number of ranks written into the code?"
    return "Does every entry of the flat gradient lie where its parameter lies in the flat unit?"
