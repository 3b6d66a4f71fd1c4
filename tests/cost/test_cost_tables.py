"""Closed forms of published papers, reproduced cell by cell."""

from __future__ import annotations

import json
import math

import pytest
import torch
from reference import REFERENCE, ints, rows

from minidist import cost
from minidist.model import Block, GPTConfig

RESULTS = REFERENCE.parent / "results"


def megatron(row: dict[str, str]) -> cost.Transformer:
    width, layers, heads = ints(row, "hidden", "layers", "heads")
    return cost.megatron_gpt(width=width, num_layers=layers, num_heads=heads)


def test_zero_table_1():
    """Model states per GPU of 7.5 B, 128 B and 1 T parameters on 1 to 1,024 GPUs (rounded)."""
    for row in rows("zero_table1_memory"):
        for stage, name in ((1, "p_os_gb"), (2, "p_os_g_gb"), (3, "p_os_g_p_gb")):
            each = cost.MIXED_ADAM.per_rank(zero_stage=stage, num_ranks=int(row["dp"]))
            assert each.total * float(row["params_b"]) == pytest.approx(float(row[name]), rel=0.025)


def test_megatron_distributed_optimizer():
    precisions = ("fp16_fp32_grad_copy", "bf16_fp32_grads", "fp32")
    table = rows("megatron_dist_optimizer_bytes")
    for precision, row in zip(precisions, table, strict=True):
        states = cost.state_bytes(precision=precision)
        assert states.total == float(row["bytes_per_param_nondistributed"])
        fixed, sharded = row["bytes_per_param_distributed_d"].split("+")
        for d in (1, 8, 64):
            expected = float(fixed) + float(sharded.split("/")[0]) / d
            assert states.per_rank(zero_stage=1, num_ranks=d).total == pytest.approx(expected)


@pytest.mark.parametrize(
    ("configuration", "options"),
    [
        ("no parallelism", {}),
        ("tensor parallel (baseline)", {"tp": 4}),
        ("tensor+sequence parallel", {"tp": 4, "sequence_parallel": True}),
        ("tensor parallel + selective recompute", {"tp": 4, "recompute": "selective"}),
        (
            "tensor+sequence parallel + selective recompute",
            {"tp": 4, "sequence_parallel": True, "recompute": "selective"},
        ),
        ("full recompute", {"tp": 4, "recompute": "full"}),
    ],
)
def test_korthikanti_table_2(configuration: str, options: dict):
    """The formulas of the paper, evaluated as they are printed."""
    formulas = {
        row["configuration"]: row["bytes_per_layer"] for row in rows("korthikanti2022_act_memory")
    }
    for row in rows("korthikanti2022_configs"):
        model = megatron(row)
        names = {"s": model.context, "b": 3, "h": model.width, "a": model.num_heads, "t": 4}
        expected = eval(formulas[configuration], {}, names)
        ours = cost.activation_bytes_per_layer(model=model, micro_batch=3, **options)
        assert ours == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_block_keeps_what_torch_saves_for_backward(autocast):
    """Counted: every storage that autograd saves, without the copies of the weights."""
    config = GPTConfig(num_layers=1, width=128, vocab_size=64, context=64, num_heads=2)
    block = Block(config).to(torch.float32 if autocast else torch.bfloat16)
    x_BTD = torch.randn(3, 64, 128, dtype=next(block.parameters()).dtype, requires_grad=True)
    shapes = {p.shape for p in block.parameters()} | {p.t().shape for p in block.parameters()}
    kept = {}  # by address; it holds the tensors, so no address comes twice

    def keep(tensor):
        if tensor.shape not in shapes:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        block(x_BTD)
    model = cost.Transformer.from_config(config)
    predicted = cost.activation_bytes_per_layer(
        model=model, micro_batch=3, fused_attention=True, dropout=False, autocast=autocast
    )
    # Not in the formula: means and deviations of the norms, and a number per query and head.
    counted = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert predicted < counted < 1.01 * predicted


@pytest.mark.parametrize(
    ("recompute", "name", "rel"),
    [
        ("none", "peak memory without activation checkpointing", 0.03),
        ("full", "peak memory with activation checkpointing", 0.07),
    ],
)
def test_peak_memory_of_a_step_on_an_h100(recompute, name, rel):
    """GPT-2 medium in bf16 under autocast, measured by `make gpu`."""
    [path] = RESULTS.glob("gpu_2026-11-27T184034Z_*.json")
    measured = {row["name"]: row["value"] for row in json.loads(path.read_text("utf-8"))["rows"]}
    sizes = {"num_layers": 24, "width": 1024, "vocab_size": 50304, "context": 1024}
    model = cost.Transformer.from_config(GPTConfig(**sizes, num_heads=16, tied=True))
    assert model.num_parameters == pytest.approx(measured["parameters of the model"], rel=1e-3)
    predicted = cost.memory_per_gpu(
        model=model,
        parallelism=cost.ParallelismConfig(),
        micro_batch=8,
        states=cost.state_bytes(precision="fp32"),
        recompute=recompute,
        fused_attention=True,
        autocast=True,
        framework_bytes=0,
    )
    assert predicted.total == pytest.approx(measured[name], rel=rel)


def test_korthikanti_figure_1():
    """Parameters and optimiser at 18 bytes without embeddings; activations of the first stage."""
    gib = {row["model"]: row for row in rows("korthikanti2022_fig1_memory_gib")}
    for row in rows("korthikanti2022_configs"):
        model, published = megatron(row), gib[row["model"]]
        tp, pp, batch, chunks = ints(row, "tp", "pp", "micro_batch", "interleave_chunks")
        states = cost.state_bytes(precision="bf16_fp32_grads").total
        weights = 12 * model.num_layers * model.width**2 / (tp * pp)
        assert states * weights / cost.GIB == float(published["param_opt_gib"])
        layers = cost.in_flight_layers(num_layers=model.num_layers, pp=pp, virtual_stages=chunks)
        for column, options in (
            ("act_gib_none", {}),
            ("act_gib_seqsel", {"sequence_parallel": True, "recompute": "selective"}),
        ):
            each = cost.activation_bytes_per_layer(model=model, micro_batch=batch, tp=tp, **options)
            assert layers * each / cost.GIB == pytest.approx(float(published[column]), rel=1e-9)


def test_korthikanti_figure_7():
    """Activation memory in percent of plain tensor parallelism, read off the figure to 0.15."""
    percent = {row["model"]: row for row in rows("korthikanti2022_fig7_memory_pct")}
    options = {
        "seq": {"sequence_parallel": True},
        "sel": {"recompute": "selective"},
        "seqsel": {"sequence_parallel": True, "recompute": "selective"},
        "full": {"recompute": "full"},
    }
    for row in rows("korthikanti2022_configs"):
        model = megatron(row)
        plain = cost.activation_bytes_per_layer(model=model, micro_batch=1, tp=8)
        for name, option in options.items():
            size = cost.activation_bytes_per_layer(model=model, micro_batch=1, tp=8, **option)
            published = float(percent[row["model"]][name])
            assert 100 * size / plain == pytest.approx(published, abs=0.15), (row["model"], name)


def test_megatron_parameters_and_training_time():
    for row in rows("megatron2021_table1"):
        published = float(row["params_b"])  # rounded to 0.1 billion
        assert megatron(row).num_parameters / 1e9 == pytest.approx(published, abs=0.05, rel=1e-3)
    for row in rows("megatron2021_training_time"):
        seconds = cost.training_seconds_from_flops(
            num_parameters=float(row["params"]),
            tokens=float(row["tokens"]),
            num_gpus=int(row["gpus"]),
            flops_per_s_per_gpu=float(row["tflops_per_gpu"]) * 1e12,
            flops_per_parameter=8,
        )
        assert seconds / cost.DAY_S == pytest.approx(float(row["days_by_formula"]), rel=1e-3)
        assert seconds / cost.DAY_S == pytest.approx(float(row["days_reported"]), rel=0.01)


def test_megatron_table_2_days():
    """Days for 300 B tokens follow from TFLOP/s per GPU: 8 T P / (n X), within 4 % of the table."""
    for row in rows("megatron2021_table2_zero3"):
        seconds = cost.training_seconds_from_flops(
            num_parameters=float(row["params_b"]) * 1e9,
            tokens=300e9,
            num_gpus=int(row["gpus"]),
            flops_per_s_per_gpu=float(row["tflops_per_gpu"]) * 1e12,
            flops_per_parameter=8,
        )
        assert seconds / cost.DAY_S == pytest.approx(float(row["days_300B_tokens"]), rel=0.04)


def test_megatron_flops_counted_block_by_block():
    for row in rows("megatron2021_table1"):
        model = megatron(row)
        for recompute, with_it in (("full", True), ("none", False)):
            per_sequence = model.context * model.flops_per_token(recompute=recompute)
            formula = cost.megatron_iteration_flops(
                model=model, global_batch=1, with_recompute=with_it
            )
            assert per_sequence == pytest.approx(formula, rel=1e-12)


def test_torchtitan_and_mosaic_mfu():
    """MFU from published tokens per second, within 2 % (relative) of what they print. Both count
    6N with the token table in N, although looking up costs nothing: 5 % too much for an 8B."""
    models = {
        "llama3-8B": cost.LLAMA3_8B,
        "llama3-70B": cost.LLAMA3_70B,
        "llama2-13B": cost.LLAMA2_13B,
        "llama2-70B": cost.LLAMA2_70B,
    }
    for row in rows("torchtitan_a100_64"):
        model = models[row["model"]]
        mfu = cost.utilization(
            flops_per_token=6 * model.num_parameters + 3 * model.attention_flops_per_token(),
            tokens_per_s=float(row["wps_per_gpu"]),
            num_gpus=1,
            peak_flops_per_s=cost.A100.peak(),
        )
        assert 100 * mfu == pytest.approx(float(row["mfu_pct"]), rel=0.02), row
    peaks = {"h100_80gb": cost.H100, "a100_80gb": cost.A100, "a100_40gb": cost.A100_40GB}
    for row in rows("mosaic_llmfoundry"):
        seq, width, layers = ints(row, "seq", "d_model", "n_layers")
        per_token = 6 * float(row["nparams"]) + 12 * layers * width * seq
        mfu = cost.utilization(
            flops_per_token=per_token,
            tokens_per_s=float(row["tok_s_gpu"]),
            num_gpus=1,
            peak_flops_per_s=peaks[row["gpu"]].peak(),
        )
        assert 100 * mfu == pytest.approx(float(row["mfu"]), rel=0.02), row


def test_bubble_formulas():
    """The table's formulas, as they are printed."""
    for row in rows("pipeline_bubble_formulas"):
        if "interleaved" in row["schedule"]:
            options = {"schedule": "interleaved", "virtual_stages": 3}
        elif row["schedule"] in ("GPipe", "1F1B"):
            options = {"schedule": row["schedule"].lower()}
        else:
            continue
        for p, m in ((2, 4), (8, 8), (8, 64)):
            names = {"p": p, "m": m, "v": 3}
            chunks = options.get("virtual_stages", 1)
            total = eval(row["fraction_of_total"].replace(")(", ")*("), names)
            ideal = eval(row["ratio_to_ideal"], names)
            ours = cost.bubble_fraction(num_stages=p, num_microbatches=m, **options)
            assert ours == pytest.approx(total, rel=1e-12)
            ratio = cost.bubble_ratio(num_stages=p, num_microbatches=m, virtual_stages=chunks)
            assert ratio == pytest.approx(ideal, rel=1e-12)
            assert ours == pytest.approx(ideal / (1 + ideal), rel=1e-12)


def test_zero_bubble_rates():
    """Published rates include transfers (0.6 to 0.8 ms against 46 ms of work); ours do not, so ours
    are lower: by 0.01 to 0.03 of the step, and by no more than the transfers can explain."""
    for row in rows("zero_bubble_1p5b"):
        forward, inputs, weights, comm = (
            float(row[name]) for name in ("tF_ms", "tB_ms", "tW_ms", "tComm_ms")
        )
        p, m = ints(row, "p", "m")
        for schedule, column in (("1f1b", "bubble_1f1b"), ("zb_h1", "bubble_zbh1")):
            ours = cost.bubble_fraction(
                num_stages=p,
                num_microbatches=m,
                schedule=schedule,
                forward_s=forward,
                backward_s=inputs + weights,
                weight_backward_s=weights,
            )
            published = float(row[column])
            most = 2 * (m + p) * comm / (m * (forward + inputs + weights))
            assert 0 < published - ours < most, (schedule, m)


def test_hardware_agrees_with_the_table():
    gpus = {
        "A100-SXM-80": (cost.A100, cost.NVLINK3),
        "H100-SXM": (cost.H100, cost.NVLINK4),
        "H200-SXM": (cost.H200, cost.NVLINK4),
        "B200-SXM": (cost.B200, cost.NVLINK5),
        "V100-SXM": (cost.V100, cost.NVLINK2),
    }
    for row in rows("hardware"):
        gpu, nvlink = gpus[row["gpu"]]
        sixteen_bit = "fp16" if gpu is cost.V100 else "bf16"
        assert gpu.peak(sixteen_bit) == float(row["bf16_dense_tflops"]) * 1e12
        assert gpu.peak("fp32") == pytest.approx(float(row["fp32_tflops"]) * 1e12)
        for dtype in ("tf32", "fp8"):
            if row[f"{dtype}_dense_tflops"]:
                assert gpu.peak(dtype) == float(row[f"{dtype}_dense_tflops"]) * 1e12
            else:
                with pytest.raises(ValueError, match=f"no peak for '{dtype}'"):
                    gpu.peak(dtype)
        assert gpu.memory_bytes == float(row["hbm_gb"]) * 1e9
        assert gpu.memory_bandwidth_bytes_per_s == float(row["hbm_tbps"]) * 1e12
        assert nvlink.bandwidth_bytes_per_s == float(row["nvlink_uni_gbps"]) * 1e9
        assert nvlink.bidirectional_bytes_per_s == float(row["nvlink_bidir_gbps"]) * 1e9


def test_nccl_constants_are_those_of_the_table():
    for row in rows("nccl_tuning_model"):
        for algorithm in cost.nccl.ALGORITHMS:
            published = tuple(float(row[f"{algorithm}_{p}"]) for p in cost.nccl.PROTOCOLS)
            if row["item"] == "baseLat_us":
                assert cost.nccl.VERSIONS["2.7.5"].base_latency_us[algorithm] == published
            else:
                kind = row["item"].removeprefix("hwLat_").removesuffix("_us")
                assert cost.nccl.VERSIONS["2.7.5"].hop_latency_us[kind][algorithm] == published


def test_bus_factors():
    names = {
        "all_reduce in-network reduction": "all_reduce_in_network",
        "alltoall": "all_to_all",
    }
    for row in rows("nccl_busbw_factors"):
        kind = names.get(row["collective"], row["collective"])
        for n in (2, 3, 8, 64):
            expected = eval(row["busbw_over_algbw"].replace("2(", "2*("), {"n": n})
            assert cost.bus_factor(kind=kind, num_ranks=n) == pytest.approx(expected)
    assert math.isclose(cost.bus_factor(kind="send", num_ranks=2), 1.0)
