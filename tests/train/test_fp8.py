"""fp8 with scales per tensor, tile and block, against loops over blocks and torch's casts."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from minidist.model import GPT, GPTConfig, lm_loss
from minidist.precision import (
    FORMATS,
    FP8_RECIPES,
    BlockScaling,
    DelayedScale,
    Fp8Linear,
    fp8_product,
    quantize,
    round_to,
    use_fp8,
)

SCALINGS = {
    "tensor": BlockScaling(),
    "tensor e5m2": BlockScaling(format="fp8_e5m2"),
    "tile": BlockScaling(rows=1, columns=128),
    "square": BlockScaling(rows=128, columns=128),
    "mx": BlockScaling(rows=1, columns=32, power_of_two=True),
    "mx e5m2": BlockScaling(format="fp8_e5m2", rows=1, columns=32, power_of_two=True),
    "odd": BlockScaling(rows=3, columns=7),
}
SHAPES = [(1, 1), (5, 130), (128, 128), (200, 96)]


def numbers(shape, seed: int = 0) -> torch.Tensor:
    """Ordinary numbers, rows of very different size, some zeros and one outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-12, 6, (shape[0], 1), generator=generator)
    x[:, ::5] = 0
    x[-1, -1] = -3000.0
    return x


def by_hand(x: torch.Tensor, scaling: BlockScaling) -> tuple[torch.Tensor, int]:
    """The rounded numbers, and the number of scales: block by block, in Python and fp64."""
    fmt = FORMATS[scaling.format]
    rows, columns = scaling.rows or x.shape[0], scaling.columns or x.shape[1]
    out, blocks = torch.zeros_like(x, dtype=torch.float64), 0
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            part = x[top : top + rows, left : left + columns].double()
            largest, blocks = part.abs().max().item(), blocks + 1
            if largest == 0:
                scale = 1.0
            elif scaling.power_of_two:
                scale = 2.0 ** (math.floor(math.log2(largest)) - fmt.max_exponent)
            else:
                scale = torch.tensor(largest / fmt.max).float().item()
            shrunk = (part.float() / scale).double().clamp(-fmt.max, fmt.max)
            out[top : top + rows, left : left + columns] = round_to(shrunk, fmt) * scale
    return out, blocks


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SCALINGS)
def test_blocks_are_rounded_as_by_hand(name, shape):
    scaling, x = SCALINGS[name], numbers(shape)
    made = quantize(x, scaling)
    expected, blocks = by_hand(x, scaling)
    assert made.values.dtype == FORMATS[scaling.format].dtype
    assert made.values.shape == x.shape
    assert made.scales.numel() == blocks
    torch.testing.assert_close(made.numbers().double(), expected, rtol=1e-6, atol=0)
    assert made.num_bytes == x.numel() + blocks * (1 if scaling.power_of_two else 4)


def test_a_scale_per_tensor_is_a_cast_between_two_multiplications():
    x = numbers((64, 64))
    for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        scale = x.abs().max() / torch.finfo(dtype).max
        cast = (x / scale).to(dtype)
        made = quantize(x, BlockScaling(format=name))
        assert torch.equal(made.values.float(), cast.float())
        assert torch.equal(made.numbers(), cast.float() * scale)


def test_a_product_is_what_torch_computes_from_fp8():
    a, b = numbers((32, 64), 1), numbers((48, 64), 2)
    qa, qb = quantize(a, BlockScaling()), quantize(b, BlockScaling())
    expected = torch._scaled_mm(
        *(qa.values, qb.values.t(), qa.scales.view(()), qb.scales.view(())),
        out_dtype=torch.float32,
    )
    got = fp8_product(a, b, BlockScaling(), BlockScaling())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * got.abs().max().item())


def test_scales_of_mxfp8_are_powers_of_two_and_may_cut_the_largest():
    x = torch.tensor([[1.99 * 2.0**-20] * 32 + [448.0] * 32 + [480.0] * 32])
    made = quantize(x, SCALINGS["mx"])
    assert made.scales.tolist() == [[2.0**-28, 1.0, 1.0]]
    assert made.numbers()[0, 32].item() == 448.0
    assert made.numbers()[0, 64].item() == 448.0, "480 is cut, since the exponent is rounded down"


def test_what_is_not_finite_stays_in_its_block():
    for bad in (math.inf, math.nan):
        x = torch.ones(1, 96)
        x[0, 40] = bad
        for scaling in (SCALINGS["mx"], BlockScaling(rows=1, columns=32)):
            finite = quantize(x, scaling).numbers().isfinite()[0]
            assert finite[:32].all()
            assert finite[64:].all()
            assert not finite[40]


def test_an_outlier_costs_its_own_block_only():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    x[0, 0] = 1e6
    alone = {}
    for name in ("tensor", "tile", "mx"):
        rounded = quantize(x, SCALINGS[name]).numbers()
        alone[name] = ((rounded - x)[1:].norm() / x[1:].norm()).item()
    assert alone["tensor"] > 0.9
    assert alone["tile"] < 0.04
    assert alone["mx"] < 0.04


def test_products_forward_and_backward():
    """A layer's output and gradients are those of the rounded matrices, by fp64 products."""
    for recipe in FP8_RECIPES.values():
        x = numbers((40, 96), 1).requires_grad_()
        linear = nn.Linear(96, 48)
        layer = Fp8Linear(linear, recipe)
        grad = numbers((40, 48), 2)
        layer(x.view(4, 10, 96)).backward(grad.view(4, 10, 48))

        def rounded(value, scaling):
            return by_hand(value.detach(), scaling)[0]

        rx, rw = rounded(x, recipe.activations), rounded(linear.weight, recipe.weights)
        y = layer(x).detach().double()
        close = {"rtol": 1e-4, "atol": 1e-4 * y.abs().max().item()}
        torch.testing.assert_close(y, rx @ rw.T + linear.bias.double(), **close)
        gx = rounded(grad, recipe.gradients) @ rounded(linear.weight.T, recipe.weights).T
        gw = rounded(grad.T, recipe.gradients) @ rounded(rx.T.float(), recipe.activations).T
        close = {"rtol": 1e-4, "atol": 1e-5 * gx.abs().max().item()}
        torch.testing.assert_close(x.grad.double(), gx, **close)
        close = {"rtol": 1e-4, "atol": 1e-5 * gw.abs().max().item()}
        torch.testing.assert_close(linear.weight.grad.double(), gw, **close)
        torch.testing.assert_close(linear.bias.grad, grad.sum(0))
        product = fp8_product(x, linear.weight, recipe.activations, recipe.weights)
        torch.testing.assert_close(product.detach().double(), rx @ rw.T, rtol=1e-4, atol=1e-2)


def test_inputs_are_kept_in_fp8():
    kept = []
    layer = Fp8Linear(nn.Linear(128, 16), FP8_RECIPES["tile"])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(64, 128))
    by_dtype = {t.dtype: t.numel() for t in kept if t.shape != layer.weight.shape}
    assert by_dtype == {torch.float8_e4m3fn: 64 * 128, torch.float32: 64}


def test_a_model_learns_as_in_fp32_and_its_parameters_stay():
    config = GPTConfig(vocab_size=16, context=16, width=16, num_layers=2, num_heads=4)
    tokens = torch.randint(16, (8, 17), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    torch.set_num_threads(1)  # many small operations, on a machine that may be busy
    first = GPT(config)
    ends = {}
    for name in ("fp32", "tile", "mxfp8"):
        model = copy.deepcopy(first)
        keys = list(model.state_dict())
        if name != "fp32":
            changed = use_fp8(model, FP8_RECIPES[name])
            assert len(changed) == 2 * 6
            assert "head" not in changed
            assert list(model.state_dict()) == keys
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(10):
            optimizer.zero_grad()
            loss = lm_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
        ends[name] = loss.item()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert ends["fp32"] < 2.5  # it began at log 16 = 2.77
    assert ends["tile"] == pytest.approx(ends["fp32"], rel=0.05)
    assert ends["mxfp8"] == pytest.approx(ends["fp32"], rel=0.05)


def test_a_delayed_scale_cuts_what_is_suddenly_larger():
    delayed = DelayedScale(history=3)
    one = torch.ones(4, 4)
    assert torch.equal(delayed.quantize(one).numbers(), one)
    assert delayed.quantize(64 * one).numbers().max() == 1.0, "cut at the scale of before"
    assert torch.equal(delayed.quantize(64 * one).numbers(), 64 * one)
    for _ in range(2):
        assert delayed.quantize(one).scales.item() == pytest.approx(64 / 448)
    delayed.quantize(one)
    assert delayed.quantize(one).scales.item() == pytest.approx(1 / 448), "forgotten after three"


def test_bad_input():
    with pytest.raises(ValueError, match="fp8_e4m3 or fp8_e5m2, got 'fp16'"):
        BlockScaling(format="fp16")
    with pytest.raises(ValueError, match="columns of a block must be at least 1, got 0"):
        BlockScaling(columns=0)
    with pytest.raises(ValueError, match=r"needs a matrix \(2 dimensions\), got shape \(3,\)"):
        quantize(torch.ones(3), BlockScaling())
    with pytest.raises(ValueError, match=r"LayerNorm has no nn.Linear"):
        use_fp8(nn.LayerNorm(3), FP8_RECIPES["tile"])


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (0, 64)])
def test_shapes_and_dtypes_are_those_of_the_layer(recipe, shape):
    for dtype, autocast in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        torch.manual_seed(0)
        layer = nn.Linear(64, 8).to(dtype)
        mine, x = Fp8Linear(layer, FP8_RECIPES[recipe]), torch.randn(shape).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, got = layer(x), mine(x)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(got, expected, rtol=0.1, atol=0.1)
        if autocast:  # rounded once, at the end
            assert torch.equal(got, mine(x).to(torch.bfloat16))
        got.sum().backward()


def test_a_layer_with_two_names_is_changed_under_both():
    model = nn.Module()
    model.first = nn.Linear(4, 4)
    model.again = model.first
    assert use_fp8(model, FP8_RECIPES["tile"]) == ["first", "again"]
    assert isinstance(model.again, Fp8Linear)


def test_gradients_of_gradients_are_refused_not_left_out():
    layer, x = Fp8Linear(nn.Linear(4, 3), FP8_RECIPES["tile"]), torch.randn(2, 4)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (grad.pow(2).sum() + layer(x).sum()).backward()


@pytest.mark.parametrize("odd", [0.0, math.inf, math.nan])
def test_a_delayed_scale_does_not_remember_what_has_no_largest_number(odd):
    for before in ([], [1e-5]):
        delayed = DelayedScale()
        for value in (*before, odd):
            delayed.quantize(torch.full((2, 2), value))
        delayed.quantize(torch.ones(0, 2))
        got = delayed.quantize(torch.full((2, 2), 1e-5)).numbers()
        torch.testing.assert_close(got, torch.full((2, 2), 1e-5))
