"""Scaling laws, pipelines, configurations and the recommender, by their properties."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import cost
from minidist.model import GPT, GPTConfig

SMALL = cost.Transformer(vocab_size=50304, context=1024, width=768, num_layers=12, num_heads=12)


# -------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize(("tied", "bias", "ratio"), [*itertools.product((0, 1), (0, 1), (4, 2))])
def test_parameters_are_those_of_the_model(tied: int, bias: int, ratio: int):
    config = GPTConfig(
        vocab_size=50,
        context=16,
        width=24,
        num_layers=3,
        num_heads=4,
        mlp_ratio=ratio,
        tied=bool(tied),
        bias=bool(bias),
    )
    counted = sum(p.numel() for p in GPT(config).parameters())
    assert cost.Transformer.from_config(config).num_parameters == counted


def test_published_parameter_counts():
    for model, billions in (
        (cost.LLAMA2_7B, 6.738),
        (cost.LLAMA2_13B, 13.016),
        (cost.LLAMA2_70B, 68.977),
        (cost.LLAMA3_8B, 8.030),
        (cost.LLAMA3_70B, 70.554),
    ):
        assert model.num_parameters / 1e9 == pytest.approx(billions, abs=5e-4)


# --------------------------------------------------------------------------------------- pipelines


def pipeline_by_steps(p: int, m: int, forward: float, backward: float, schedule: str) -> float:
    """Finish time of a GPipe or 1F1B schedule, by a clock per stage and the data dependencies."""
    orders = []
    for stage in range(p):
        if schedule == "gpipe":
            order = [("F", i) for i in range(m)] + [("B", i) for i in range(m)]
        else:
            warm = min(p - stage - 1, m)
            order = [("F", i) for i in range(warm)]
            for i in range(m - warm):
                order += [("F", warm + i), ("B", i)]
            order += [("B", i) for i in range(m - warm, m)]
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * p, [0] * p
    while any(position[s] < len(orders[s]) for s in range(p)):
        for s in range(p):
            if position[s] == len(orders[s]):
                continue
            kind, i = orders[s][position[s]]
            if kind == "F":
                needs = 0.0 if s == 0 else done.get(("F", i, s - 1))
            else:
                needs = done.get(("F", i, s)) if s == p - 1 else done.get(("B", i, s + 1))
            if needs is None:
                continue
            clock[s] = max(clock[s], needs) + (forward if kind == "F" else backward)
            done[kind, i, s] = clock[s]
            position[s] += 1
    return max(clock)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (3, 4), (4, 4), (4, 13), (8, 8)])
def test_bubble_is_what_the_schedule_leaves_idle(schedule: str, p: int, m: int):
    total = pipeline_by_steps(p, m, 1.0, 2.0, schedule)
    idle = 1 - m * 3.0 / total
    ours = cost.bubble_fraction(num_stages=p, num_microbatches=m, schedule=schedule)
    assert ours == pytest.approx(idle, abs=1e-12)
    assert cost.pipeline_utilization(num_stages=p, num_microbatches=m) == pytest.approx(1 - idle)


def test_microbatches_for_is_the_fewest():
    for p, u, v in itertools.product((2, 4, 9), (0.5, 0.8, 0.9, 0.99), (1, 2)):
        m = cost.microbatches_for(num_stages=p, utilization=u, virtual_stages=v)
        at = [
            cost.pipeline_utilization(num_stages=p, num_microbatches=k, virtual_stages=v)
            for k in (m, max(1, m - 1))
        ]
        assert at[0] >= u - 1e-9
        assert m == 1 or at[1] < u


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    num_layers=st.integers(1, 40),
    num_gpus=st.integers(1, 9),
    layer_s=st.floats(1e-4, 1),
    transfer_s=st.floats(0, 1),
)
def test_naive_model_parallel_is_never_better_than_one_gpu(
    num_layers: int, num_gpus: int, layer_s: float, transfer_s: float
):
    if num_layers < num_gpus:
        return
    result = cost.naive_model_parallel(
        num_layers=num_layers, num_gpus=num_gpus, layer_s=layer_s, transfer_s=transfer_s
    )
    assert result.total_s >= 2 * num_layers * layer_s * (1 - 1e-12)
    assert result.utilization <= 1 / num_gpus + 1e-12


# ----------------------------------------------------------------------------------------- scaling


def test_scaling_laws_at_their_ends():
    assert cost.amdahl_speedup(serial_fraction=0, num_gpus=64) == 64
    assert cost.amdahl_speedup(serial_fraction=0.1, num_gpus=math.inf) == pytest.approx(10)
    for f, n in ((0.05, 4), (0.3, 100)):
        speedup = cost.amdahl_speedup(serial_fraction=f, num_gpus=n)
        assert cost.karp_flatt(speedup=speedup, num_gpus=n) == pytest.approx(f)


def test_overlap_hides_at_most_the_computation():
    options = {"num_gpus": 8, "compute_s": 0.1}
    assert cost.speedup_with_communication(**options, communication_s=0.05, overlap_fraction=1) == 8
    hidden = cost.speedup_with_communication(**options, communication_s=0.3, overlap_fraction=1)
    assert hidden == pytest.approx(8 / 3)


def test_bottleneck_names_the_largest_loss():
    def limit(**times) -> str:
        return cost.bottleneck(num_gpus=8, **times).limit

    assert limit(compute_s=95, communication_s=5) == "compute"
    assert limit(compute_s=60, communication_s=40) == "communication"
    assert limit(compute_s=60, communication_s=40, overlapped_s=38) == "compute"
    assert limit(compute_s=60, communication_s=10, loader_s=30) == "loader"
    assert limit(compute_s=60, communication_s=10, step_s=100) == "idle"
    result = cost.bottleneck(compute_s=60, communication_s=10, loader_s=10, step_s=100, num_gpus=8)
    assert sum(result.shares.values()) == pytest.approx(1)
    assert result.speedup == pytest.approx(4.8)
    with pytest.raises(ValueError, match="more than the step"):
        cost.bottleneck(compute_s=60, communication_s=50, step_s=100, num_gpus=8)


def test_critical_batch_size_comes_back():
    for batches in ((100, 1000), (64, 8192)):
        steps = tuple(
            cost.steps_and_examples(batch=b, critical_batch=777.0, min_steps=100)[0]
            for b in batches
        )
        assert cost.critical_batch_size(batches=batches, steps=steps) == pytest.approx(777)
    with pytest.raises(ValueError, match="less than proportionally"):
        cost.critical_batch_size(batches=(100, 200), steps=(100, 50))


@pytest.mark.parametrize(
    ("small", "big", "told"),
    [(4.1, 1.0, "|G|^2 = -0.0333"), (1.0, 1.2, "tr(S) = -2.133"), (4, 1, "= 0 ")],
)
def test_a_noise_scale_of_too_few_norms_is_refused(small: float, big: float, told: str):
    """It came out as -992, as -1.7 or as a division by zero."""
    with pytest.raises(ValueError, match=f"{re.escape(told)}.*average the norms"):
        cost.noise_scale(grad_sq_small=small, grad_sq_big=big, small=8, big=32)


# ------------------------------------------------------------------------------------------- plans


def test_errors_state_the_arithmetic():
    config = cost.ParallelismConfig(dp=2, tp=2, pp=2)
    with pytest.raises(ValueError, match="= 8, but there are 6 ranks"):
        config.validate(world_size=6)
    with pytest.raises(ValueError, match=r"12 heads do not divide by tp = 8: 12 / 8 = 1.5"):
        cost.ParallelismConfig(tp=8).validate(world_size=8, model=SMALL)
    with pytest.raises(ValueError, match=r"12 layers do not divide by pp = 5: 12 / 5 = 2.4"):
        cost.ParallelismConfig(pp=5).validate(world_size=5, model=SMALL)
    with pytest.raises(ValueError, match="5 sequences are left over"):
        cost.ParallelismConfig(dp=7).validate(world_size=7, model=SMALL, global_batch=33)
    with pytest.raises(ValueError, match="does not stay inside a node of 4"):
        cost.ParallelismConfig(tp=6).validate(world_size=6, model=SMALL, gpus_per_node=4)
    for wrong in ({"dp": 0}, {"tp": 1.5}, {"zero_stage": 4}, {"virtual_stages": 2}):
        with pytest.raises(ValueError, match="ParallelismConfig"):
            cost.ParallelismConfig(**wrong)
    valid = cost.ParallelismConfig(dp=2, tp=4, pp=3)
    assert valid.validate(world_size=24, model=SMALL, global_batch=8, gpus_per_node=8) is valid


@settings(derandomize=True, max_examples=40, deadline=None)
@given(num_gpus=st.integers(1, 130), gpus_per_node=st.sampled_from([1, 4, 8]))
def test_enumeration_uses_all_gpus(num_gpus: int, gpus_per_node: int):
    found = list(cost.parallelisms(num_gpus=num_gpus, gpus_per_node=gpus_per_node, max_cp=4))
    assert len({str(p) for p in found}) == len(found) >= 1
    assert all(p.world_size == num_gpus and p.tp <= gpus_per_node for p in found)


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 5, 6, 7, 12, 13, 64, 100, 129])
def test_recommender_works_for_any_number_of_gpus(num_gpus: int):
    """The source's version divides by zero below 8 GPUs and turns 100 of them into 64."""
    plans = cost.recommend(
        model=SMALL, node=cost.DGX_A100, num_gpus=num_gpus, global_batch=8 * num_gpus, limit=50
    )
    for plan in plans:
        assert plan.parallelism.world_size == num_gpus
        assert plan.memory.total <= cost.A100.memory_bytes
        assert not plan.parallelism.problems(
            model=SMALL, global_batch=8 * num_gpus, micro_batch=plan.micro_batch, gpus_per_node=8
        )
        samples = plan.parallelism.dp * plan.micro_batch * plan.num_microbatches
        assert samples == 8 * num_gpus
    best = min(plan.step.total_s for plan in plans)
    assert plans[0].step.total_s <= 1.02 * best
    assert plans[0].parallelism.model_ranks == 1, "a small model needs data parallelism only"


def test_recommender_for_models_that_need_more():
    """70 B on 64 and 100 GPUs: split, and it fits; the reasons have the numbers."""
    for num_gpus, batch in ((64, 256), (100, 400)):
        best = cost.recommend(
            model=cost.LLAMA2_70B, node=cost.DGX_A100, num_gpus=num_gpus, global_batch=batch
        )[0]
        assert best.parallelism.world_size == num_gpus
        assert best.parallelism.model_ranks > 1 or best.parallelism.zero_stage == 3
        assert "69.0 B parameters x 16 bytes = 1104 GB" in best.reasons[0]
        assert any("of 80 GB" in reason for reason in best.reasons)
    text = str(best)
    assert "MFU" in text


def test_recommender_says_why_nothing_fits():
    with pytest.raises(cost.NothingFitsError, match=r"nothing fits 2 GPUs with 76 GB.*nearest"):
        cost.recommend(model=cost.GPT3_175B, node=cost.DGX_A100, num_gpus=2, global_batch=4)


@pytest.mark.parametrize(
    ("num_gpus", "batch", "instead"),
    [(100, 1024, 1000), (7, 64, 63), (3, 64, 63), (6, 512, 510), (12, 256, 252), (13, 3, 13)],
)
def test_recommender_for_a_batch_that_nothing_divides(num_gpus: int, batch: int, instead: int):
    plans = cost.recommend(
        model=cost.LLAMA2_7B, node=cost.DGX_A100, num_gpus=num_gpus, global_batch=batch
    )
    for plan in plans:
        samples = plan.parallelism.dp * plan.micro_batch * plan.num_microbatches
        assert samples == plan.global_batch == instead
        assert any(r.startswith(f"batch {instead:,} instead of {batch:,}") for r in plan.reasons)


def test_memory_shrinks_where_it_should():
    def total(**options) -> float:
        plan = cost.ParallelismConfig(**options)
        return cost.memory_per_gpu(model=cost.LLAMA2_13B, parallelism=plan).total

    stages = [total(dp=8, zero_stage=stage) for stage in (0, 1, 2, 3)]
    assert stages == sorted(stages, reverse=True)
    assert total(tp=8) > total(tp=8, sequence_parallel=True)
    assert total(pp=4) < total()
    assert total(cp=2) < total()


def test_step_parts_add_up_and_react():
    def step(**changes) -> cost.StepTime:
        options = {
            "model": cost.LLAMA2_13B,
            "parallelism": cost.ParallelismConfig(dp=4, tp=4, pp=2),
            "node": cost.DGX_A100,
            "global_batch": 64,
            "fused_attention": True,
        }
        return cost.predict_step(**(options | changes))

    base = step()
    assert sum(base.shares().values()) == pytest.approx(1)
    assert base.mfu == base.hfu < 0.7
    full = step(recompute="full")
    assert full.total_s > base.total_s
    assert full.hfu > full.mfu
    slower = step(
        node=cost.Node(
            name="slow network",
            gpu=cost.A100,
            num_gpus=8,
            intra_node=cost.pcie(generation=4),
            network=cost.ETHERNET_10,
        )
    )
    assert slower.tensor_s > 5 * base.tensor_s
    assert slower.data_s > base.data_s
    fewer = step(parallelism=cost.ParallelismConfig(dp=4, tp=4))
    assert fewer.bubble_s == fewer.pipeline_s == 0 < base.bubble_s
    bubble = base.bubble_s / (base.bubble_s + base.compute_s + base.tensor_s + base.pipeline_s)
    assert bubble == pytest.approx(1 / (16 + 1), rel=0.05)
    with pytest.raises(ValueError, match="40 heads do not divide by tp = 3"):
        step(parallelism=cost.ParallelismConfig(tp=3))
