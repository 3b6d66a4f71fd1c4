"""Layouts and answers of the planner: search, experts, error bars, ties, the report."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from minidist import cost
from minidist.cost.block import product_seconds
from minidist.cost.search import TrainingJob, search
from minidist.plan import challenge, report
from minidist.plan.answer import RESERVE, options_of, plan
from minidist.plan.errors import error_bar
from minidist.plan.runs import FOLDER


def job(**changes) -> TrainingJob:
    values = {
        "model": cost.GPT3_175B,
        "node": cost.DGX_A100,
        "num_gpus": 1024,
        "global_batch": 1536,
        "states": cost.MIXED_ADAM,
    }
    return TrainingJob(**(values | changes))


# ------------------------------------------------------------------------------------------ search


def test_virtual_stages_are_tried():
    """GPT-3 on 1,024 A100: 4 chunks are better than 1, so the answer has chunks."""
    best = cost.recommend(
        model=cost.GPT3_175B, node=cost.DGX_A100, num_gpus=1024, global_batch=1536
    )[0]
    assert best.parallelism.virtual_stages > 1
    plain = cost.predict_step(
        model=cost.GPT3_175B,
        parallelism=replace(best.parallelism, virtual_stages=1),
        node=cost.DGX_A100,
        global_batch=1536,
        micro_batch=best.micro_batch,
        recompute=best.recompute,
        fused_attention=True,
        dropout=False,
    )
    assert plain.total_s > best.step.total_s
    assert any("chunks" in reason for reason in best.reasons)


def test_nothing_that_was_priced_is_faster_than_the_answer():
    """By exhaustion over a small job: every layout that divides and fits is in the list."""
    small = job(model=cost.LLAMA2_13B, num_gpus=16, global_batch=64)
    found = search(small)
    best_s = min(candidate.step.total_s for candidate in found.fitting)
    for candidate in found.fitting:
        p = candidate.parallelism
        assert not p.problems(
            model=small.model, global_batch=64, micro_batch=candidate.micro_batch, gpus_per_node=8
        )
        assert p.dp * candidate.micro_batch * candidate.num_microbatches == 64
        assert candidate.memory.total <= small.budget
        again = cost.predict_step(
            model=small.model,
            parallelism=p,
            node=small.node,
            global_batch=64,
            micro_batch=candidate.micro_batch,
            recompute=candidate.recompute,
            fused_attention=True,
            dropout=False,
        )
        assert again.total_s == pytest.approx(candidate.step.total_s, rel=1e-12)
        assert again.total_s >= best_s


@pytest.mark.parametrize(
    ("model", "max_cp"), [(cost.LLAMA3_405B, 1), (cost.LLAMA3_405B, 16), (cost.DEEPSEEK_V3, 1)]
)
def test_16384_gpus_in_a_second(model: cost.Transformer, max_cp: int):
    large = job(
        model=model,
        node=cost.DGX_H100,
        num_gpus=16384,
        global_batch=2048,
        max_cp=max_cp,
        even_stages=False,
    )
    start = time.process_time()
    answer = plan(large)
    assert time.process_time() - start <= 1.0
    best = answer.options[0].candidate.parallelism
    assert best.world_size == 16384
    assert best.pp > 1, "many layers over stages, as in the runs of the papers"


def test_experts_divide_memory_and_cost_traffic():
    """ep holds fewer experts, the same share of the optimiser, and pays for all-to-alls."""
    one, eight = (cost.ParallelismConfig(dp=64, tp=1, zero_stage=1, ep=ep) for ep in (1, 8))
    memory = [cost.memory_per_gpu(model=cost.MIXTRAL_8X7B, parallelism=p) for p in (one, eight)]
    routed = 32 * 8 * 3 * 4096 * 14336
    gone = (memory[0].parameters - memory[1].parameters) / 2
    assert gone == pytest.approx(routed * 7 / 8)
    assert memory[0].optimizer == memory[1].optimizer
    steps = [
        cost.predict_step(
            model=cost.MIXTRAL_8X7B, parallelism=p, node=cost.DGX_H100, global_batch=256
        )
        for p in (one, eight)
    ]
    assert steps[0].expert_s == 0 < steps[1].expert_s
    with pytest.raises(ValueError, match=r"8 experts do not divide by ep = 16: 8 / 16 = 0.5"):
        cost.ParallelismConfig(dp=16, ep=16).validate(world_size=16, model=cost.MIXTRAL_8X7B)
    with pytest.raises(ValueError, match="the model has no experts"):
        cost.ParallelismConfig(dp=16, ep=2).validate(world_size=16, model=cost.LLAMA3_8B)
    with pytest.raises(ValueError, match="6 ranks do not divide into groups of ep 4"):
        cost.ParallelismConfig(dp=6, ep=4)


def test_published_parameters_of_models_with_experts():
    assert cost.DEEPSEEK_V3.num_parameters / 1e9 == pytest.approx(671, abs=0.5)
    assert cost.DEEPSEEK_V3.active_parameters / 1e9 == pytest.approx(37, abs=0.6)
    assert cost.MIXTRAL_8X7B.num_parameters / 1e9 == pytest.approx(46.7, abs=0.05)
    assert cost.MIXTRAL_8X7B.active_parameters / 1e9 == pytest.approx(12.9, abs=0.05)
    assert cost.LLAMA3_405B.num_parameters / 1e9 == pytest.approx(405.9, abs=0.1)


def test_tensor_ranks_hold_whole_experts():
    """ep is drawn from the tensor ranks, too: dense weights are cut by tp, experts by ep."""
    plan = cost.ParallelismConfig(dp=8, tp=4, ep=32, sequence_parallel=True)
    model = cost.MIXTRAL_8X7B
    with_experts = replace(model, num_experts=32)
    held = cost.memory_per_gpu(model=with_experts, parallelism=plan).parameters / 2
    routed = 32 * 32 * 3 * 4096 * 14336
    assert held == pytest.approx((with_experts.num_parameters - routed) / 4 + routed / 32)


def test_tokens_travel_once_to_each_node():
    """A limit to the nodes of a token, and larger groups inside a node, save all-to-alls."""
    model = replace(cost.DEEPSEEK_V3, nodes_per_token=None)
    plan = cost.ParallelismConfig(dp=64, pp=8, ep=64, zero_stage=1)
    options = {"parallelism": plan, "node": cost.DGX_H100, "global_batch": 512}
    options |= {"even_stages": False}
    anywhere = cost.predict_step(model=model, **options).expert_s
    limited = cost.predict_step(model=cost.DEEPSEEK_V3, **options).expert_s
    # 64 experts' groups are 8 nodes; 8 experts at random are in 5.25 of them on average.
    assert limited / anywhere == pytest.approx(4 / (8 * (1 - (7 / 8) ** 8)), rel=0.02)
    inside = replace(plan, ep=8)
    near = cost.predict_step(model=model, **options | {"parallelism": inside}).expert_s
    assert near < anywhere / 3


def test_hybrid_sharding():
    """Copies of the shards cost memory, and save gathers over the network."""
    whole = cost.ParallelismConfig(dp=512, zero_stage=3)
    hybrid = replace(whole, replicas=128)  # every node of 4 GPUs has a copy
    memory = [cost.memory_per_gpu(model=cost.LLAMA2_13B, parallelism=p) for p in (whole, hybrid)]
    assert memory[1].model_states == pytest.approx(128 * memory[0].model_states)
    steps = [
        cost.predict_step(
            model=cost.LLAMA2_13B, parallelism=p, node=cost.PCIE_A100, global_batch=4096
        )
        for p in (whole, hybrid)
    ]
    assert steps[1].data_s < steps[0].data_s / 2
    assert steps[1].compute_s == steps[0].compute_s
    slow = job(model=cost.LLAMA2_13B, node=cost.PCIE_A100, num_gpus=64, global_batch=512)
    tried = {c.parallelism.replicas for c in search(slow).fitting}
    assert {1, 2, 4, 8} <= tried  # a copy in 4 nodes and more; in 2 nodes it does not fit
    fitting = search(slow).fitting
    alone = {(c.parallelism, c.micro_batch): c.step.total_s for c in fitting}
    for c in fitting:
        key = (replace(c.parallelism, replicas=1), c.micro_batch)
        if c.parallelism.replicas > 1 and key in alone:
            assert c.step.total_s < 0.99 * alone[key], "copies that gain nothing are listed"
    with pytest.raises(ValueError, match="6 ranks do not divide into 4 replicas"):
        cost.ParallelismConfig(dp=6, zero_stage=3, replicas=4)
    with pytest.raises(ValueError, match="2 replicas of shards need a zero_stage >= 1, got 0"):
        cost.ParallelismConfig(dp=4, replicas=2)
    with pytest.raises(ValueError, match="16 ranks / ep 8 = 2 copies of an expert do not divide"):
        cost.ParallelismConfig(dp=16, ep=8, zero_stage=1, replicas=4)


def test_copies_that_are_hardly_faster_are_not_listed_beside_the_plain_layout():
    answer = plan(job(model=cost.LLAMA2_13B, num_gpus=64, global_batch=256), top=100)
    keys = [
        replace(option.candidate.parallelism, replicas=1, virtual_stages=1)
        for option in answer.options
    ]
    assert len(set(keys)) == len(keys)


def test_an_all_reduce_over_many_nodes_goes_by_a_tree():
    """ZeRO-0's small buckets wait for the logarithm of the nodes, ZeRO-1's for the ring."""
    options = {"model": cost.LLAMA2_7B, "node": cost.DGX_H100, "global_batch": 4096}
    small = replace(cost.NANOTRON, bucket_bytes=1e6, shard_bucket_bytes=1e6, overlap=0.0)
    plain, sharded = (
        cost.predict_step(
            **options,
            parallelism=cost.ParallelismConfig(dp=512, tp=8, zero_stage=stage),
            software=small,
        )
        for stage in (0, 1)
    )
    assert sharded.data_s > 5 * plain.data_s


def test_a_power_limit_slows_products_by_its_third_root():
    slow = cost.H100.at_power(350)
    assert slow.matmul_efficiency / cost.H100.matmul_efficiency == pytest.approx(0.5 ** (1 / 3))
    assert slow.memory_bandwidth_bytes_per_s == cost.H100.memory_bandwidth_bytes_per_s
    with pytest.raises(ValueError, match="at 900 W: expected a power limit above 0 and at most"):
        cost.H100.at_power(900)


def test_fp8_products_take_more_than_half_the_time():
    """Inputs and weights have to be converted, which matters most for few rows."""
    options = {"gpu": cost.H100, "n": 4096.0, "k": 4096.0}
    ratios = [
        product_seconds(**options, rows=rows, dtype="fp8")
        / product_seconds(**options, rows=rows, dtype="bf16")
        for rows in (512.0, 65536.0)
    ]
    assert 1.0 > ratios[0] > ratios[1] > 0.5


# ------------------------------------------------------------------------------ against the planner


@pytest.mark.parametrize(
    ("layout", "start", "reason"),
    [
        ("dp=8 tp=7", "does not run", "= 56 GPUs, but --gpus is 64"),
        ("dp=64 zero=9", "does not run", "zero_stage is 0, 1, 2 or 3"),
        ("dp=8 tp=8", "does not fit", "a larger tp or pp, or a higher ZeRO stage"),
        ("dp=16 tp=4 zero=3 micro=16", "does not fit", "recomputation or a smaller micro-batch"),
        ("dp=1 pp=16 tp=4 recompute=full", "loses", "most is lost by"),
    ],
)
def test_why_a_layout_loses(layout: str, start: str, reason: str):
    result = challenge(job(model=cost.LLAMA2_70B, num_gpus=64, global_batch=256), layout)
    assert result.verdict.startswith(start)
    assert reason in result.verdict
    assert result.planner is not None


def test_a_layout_that_the_planner_does_not_try_can_win():
    small = job(
        model=replace(cost.LLAMA2_7B, context=1024),
        num_gpus=64,
        global_batch=768,
        micro_batches=(1,),
    )
    best = plan(small).options[0].candidate
    p = best.parallelism
    words = f"dp={p.dp} pp={p.pp} tp={p.tp} zero={p.zero_stage} chunks={p.virtual_stages}"
    words += f" recompute={best.recompute}"
    assert challenge(small, f"{words} micro=1").verdict == "is the planner's own"
    wins = challenge(small, f"{words} micro=3")
    assert wins.verdict.startswith("wins by")
    assert "micro-batches of 1," in wins.verdict
    assert float(wins.verdict.split()[2].rstrip("%")) > 15
    assert wins.verdict.endswith("the error bar is only 8%"), "more than the bar is no tie"


def test_zero_bubble_and_offload():
    options = {
        "model": cost.GPT3_175B,
        "parallelism": cost.ParallelismConfig(dp=16, pp=8, tp=8),
        "node": cost.DGX_A100,
        "global_batch": 1536,
    }
    plain, h1, h2 = (
        cost.predict_step(**options, schedule=schedule) for schedule in ("1f1b", "zb_h1", "zb_h2")
    )
    assert plain.bubble_s > h1.bubble_s > h2.bubble_s >= 0
    away = cost.predict_step(**options, offload=True)
    assert away.optimizer_s > plain.optimizer_s
    sizes = {name: options[name] for name in ("model", "parallelism")}
    assert cost.memory_per_gpu(**sizes, offload=True).optimizer == 0


# -------------------------------------------------------------------------------------- error bars


def test_error_bars_come_from_held_back_rows_of_the_kind():
    dense = cost.ParallelismConfig(dp=64, zero_stage=3)
    h100 = error_bar(cost.LLAMA3_70B, cost.DGX_H100, dense)
    assert "H100" in h100.kind
    assert "sharded" in h100.kind
    assert not h100.note
    for node in (cost.DGX_H200, cost.DGX_B200, cost.MI300X_NODE):
        other = error_bar(cost.LLAMA3_70B, node, dense)
        assert other.relative == pytest.approx(2 * h100.relative)
        assert "doubled" in other.note
    experts = error_bar(cost.DEEPSEEK_V3, cost.DGX_H100, dense)
    assert experts.kind == "with experts"
    assert experts.rows == 8
    assert not experts.note
    elsewhere = error_bar(cost.DEEPSEEK_V3, cost.DGX_A100, dense)
    assert elsewhere.relative == pytest.approx(2 * experts.relative)


def test_layouts_within_the_error_bar_are_a_tie():
    found = search(job())
    candidates = sorted(found.fitting, key=lambda candidate: candidate.step.total_s)
    options = options_of(job(), candidates)
    for option in options:
        apart = option.step_s / options[0].step_s - 1
        assert option.tie == (apart <= max(option.bar.relative, options[0].bar.relative))
    assert options[0].tie
    assert not options[-1].tie


def test_what_would_change_the_answer():
    """A small memory binds, and a constraint that costs time is named."""
    cramped = replace(cost.A100, memory_bytes=60e9)
    node = replace(cost.DGX_A100, gpu=cramped)
    answer = plan(job(node=node, reserve=RESERVE))
    assert any(change.what.startswith("memory: ") for change in answer.changes)
    bound = plan(job(allowed=lambda p: p.pp == 1))
    assert any("without them" in change.what for change in bound.changes)
    gains = [change.gain for change in answer.changes]
    assert gains == sorted(gains, reverse=True)
    assert answer.binding == answer.changes[0].what


# ------------------------------------------------------------------------------------------ report


def test_the_report_has_every_row_and_the_worst():
    records = report.rows()
    assert len(records) == 1860
    assert sum(line["rows"] for line in report.summary(records)) == 1860
    ten = report.worst(records)
    assert [record["split"] for record in ten] == ["test"] * 10
    limit = abs(ten[-1]["error"])
    rest = [r for r in records if r["split"] == "test" and r not in ten]
    assert all(abs(record["error"]) <= limit for record in rest)


def test_the_note_names_the_ten_worst_rows():
    """With their errors, in the order of the report."""
    note = (FOLDER / "README.md").read_text("utf-8")
    table = note.split("The ten worst rows:")[1]
    said = [float(error) for error in re.findall(r"\| ([+-][0-9.]+) % \|", table)]
    assert said == [round(100 * row["error"], 1) for row in report.worst(report.rows())]


def test_chosen_layouts_of_published_sweeps():
    """What the layout that the model chooses costs beside the best that was measured. The issue
    asks for 3 % everywhere; 56 of 77 sweeps are within it. Of the rest most are one cliff in the
    measurements, width 2,048 on tp 2 with 2,048 tokens."""
    costs = [sweep["costs_more"] for sweep in report.sweeps()]
    assert len(costs) == 77
    assert sum(cost <= 0.03 for cost in costs) >= 56
    assert sum(costs) / len(costs) <= 0.045
    assert sum(sweep["tie"] for sweep in report.sweeps()) >= 72
    assert all(s["costs_more"] <= 0.05 for s in report.sweeps() if s["table"] != "vtrain_one_node")
