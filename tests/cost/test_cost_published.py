"""How far `minidist.cost` is from published measurements.

What was fitted to what: the A100's efficiency to the layer times of arXiv 2205.05198, the H100's to
llm-foundry's runs, the launch time to vTrain's small models. Megatron's table, vTrain's clusters,
nanotron and llm-foundry on A100 are predictions; torchtitan nearly (see there).

The bounds are what the model reaches today, rounded up a little: mean absolute error, and how many
runs are within 25 %. They are part of the answer to "how good are these predictions", so a change
that makes them worse fails, and one that makes them better may tighten them. For scale: other
analytic and simulating tools report 4 to 15 % (benchmarks/reference/simulator_errors.csv).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import mean

import pytest
from reference import ints, rows

from minidist import cost

# vTrain's clusters have 4 HDR ports for 8 GPUs.
HALF_NETWORK = dataclasses.replace(cost.DGX_A100, network=cost.INFINIBAND_HDR.times(0.5))
A100_40 = dataclasses.replace(cost.DGX_A100, gpu=cost.A100_40GB)


def check(errors: Sequence[float], *, average: float, within_25: float) -> None:
    """Relative errors: their mean absolute value, and the share that is within 25 %."""
    assert mean(abs(e) for e in errors) <= average
    assert mean(abs(e) <= 0.25 for e in errors) >= within_25
    assert mean(abs(e) for e in errors) >= average / 2, "better than stated: tighten the bound"


def test_megatron_table_1():
    """1.7 B to 1 T on 32 to 3,072 A100. The micro-batch and the chunks are not published; ours are
    the best of a few, which is what the paper's authors chose too."""
    errors = []
    for row in rows("megatron2021_table1"):
        width, layers, heads, dp, tp, pp, batch = ints(
            row, "hidden", "layers", "heads", "dp", "tp", "pp", "batch"
        )
        model = cost.megatron_gpt(width=width, num_layers=layers, num_heads=heads)
        best = 0.0
        for micro_batch in (1, 2, 4, 8):
            for chunks in (1, 2) if pp > 1 else (1,):
                try:
                    step = cost.predict_step(
                        model=model,
                        parallelism=cost.ParallelismConfig(
                            dp=dp, tp=tp, pp=pp, virtual_stages=chunks
                        ),
                        node=cost.DGX_A100,
                        global_batch=batch,
                        micro_batch=micro_batch,
                        recompute="full",
                        overlap_dp=False,
                    )
                except ValueError:  # does not divide
                    continue
                best = max(best, step.hfu * 312)
        errors.append(best / float(row["tflops_per_gpu"]) - 1)
    check(errors, average=0.05, within_25=1.0)


def vtrain_errors(name: str, node: cost.Node) -> list[float]:
    errors = []
    for row in rows(name):
        width, layers, heads, context = ints(
            row, "hidden_size", "layers", "attention_heads", "sequence_length"
        )
        dp, tp, pp, batch, micro_batch = ints(
            row,
            "data_parallelism",
            "tensor_parallelism",
            "pipeline_parallelism",
            "global_batch",
            "micro_batch",
        )
        model = cost.Transformer(
            vocab_size=51200, context=context, width=width, num_layers=layers, num_heads=heads
        )
        step = cost.predict_step(
            model=model,
            parallelism=cost.ParallelismConfig(dp=dp, tp=tp, pp=pp),
            node=node,
            global_batch=batch,
            micro_batch=micro_batch,
            recompute="full",
            overlap_dp=False,
        )
        errors.append(step.total_s / (float(row["iteration_time_ms"]) / 1e3) - 1)
    return errors


def test_vtrain_clusters():
    """88 runs of 3.6 to 39.1 B on 64 to 512 A100, tp 1 to 16, pp 1 to 16. Off by half: runs in
    which a small change of the micro-batch doubled the measured time."""
    errors = vtrain_errors("vtrain_measured_multi_under100b", HALF_NETWORK)
    assert len(errors) == 88
    check(errors, average=0.09, within_25=0.9)


def test_vtrain_one_node():
    """60 of 1,440 runs of small models on 2 to 8 A100, many of them bound by kernel launches."""
    errors = vtrain_errors("vtrain_measured_single_sample", cost.DGX_A100)
    assert len(errors) == 60
    check(errors, average=0.12, within_25=0.85)


def test_torchtitan():
    """FSDP2 on 64 A100. "selective" there recomputes every other layer or matrix product, counted
    here as halfway between nothing and all: a reading that was chosen after "nothing" for the
    second had come out 19 to 33 % too fast."""
    models = {
        "llama3-8B": cost.LLAMA3_8B,
        "llama3-70B": cost.LLAMA3_70B,
        "llama2-13B": cost.LLAMA2_13B,
        "llama2-70B": cost.LLAMA2_70B,
    }
    errors = []
    for row in rows("torchtitan_a100_64"):
        batch = int(row["local_batch"])
        rates = []
        for recompute in {"none": ["none"], "full": ["full"]}.get(row["ac"], ["none", "full"]):
            step = cost.predict_step(
                model=models[row["model"]],
                parallelism=cost.ParallelismConfig(dp=64, zero_stage=3),
                node=cost.DGX_A100,
                global_batch=64 * batch,
                micro_batch=batch,
                recompute=recompute,
                fused_attention=True,
                dropout=False,
            )
            rates.append(step.tokens_per_s / 64)
        predicted = len(rates) / sum(1 / rate for rate in rates)
        errors.append(predicted / float(row["wps_per_gpu"]) - 1)
    check(errors, average=0.07, within_25=1.0)


@pytest.mark.parametrize(
    ("gpu", "node", "average", "within_25"),
    [
        ("h100_80gb", cost.DGX_H100, 0.15, 0.85),
        ("a100_80gb", cost.DGX_A100, 0.17, 0.75),
        ("a100_40gb", A100_40, 0.17, 0.8),
    ],
)
def test_mosaic(gpu: str, node: cost.Node, average: float, within_25: float):
    """FSDP, 125 M to 70 B, contexts of 512 to 65,536, 8 to 512 GPUs."""
    stages = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}
    errors = []
    for row in rows("mosaic_llmfoundry"):
        if row["gpu"] != gpu:
            continue
        num_gpus, context, width, layers, heads = ints(
            row, "gpus", "seq", "d_model", "n_layers", "n_heads"
        )
        step = cost.predict_step(
            model=cost.Transformer(
                vocab_size=50368,
                context=context,
                width=width,
                num_layers=layers,
                num_heads=heads,
                bias=False,
                norm_bias=False,
            ),
            parallelism=cost.ParallelismConfig(dp=num_gpus, zero_stage=stages[row["sharding"]]),
            node=node,
            global_batch=int(row["gbs"]),
            micro_batch=int(row["microbatch"]),
            recompute="full" if row["act_ckpt"] == "True" else "none",
            fused_attention=True,
            dropout=False,
        )
        errors.append(step.tokens_per_s / num_gpus / float(row["tok_s_gpu"]) - 1)
    check(errors, average=average, within_25=within_25)


def test_nanotron_3_57b():
    """The one model of that table whose sizes are known. Up to 128 GPUs within 16 % in MFU; beyond,
    the measured MFU falls away (27 % on 256, 10 % on 512, with 2 to 4 sequences per rank) and the
    prediction does not: it knows neither stragglers nor a busy network. Memory within 25 %."""
    model = cost.Transformer(
        vocab_size=131072,
        context=4096,
        width=3072,
        num_layers=28,
        num_heads=32,
        mlp_ratio=8192 / 3072,
        gated_mlp=True,
        bias=False,
        norm_bias=False,
        learned_positions=False,
    )
    assert round(model.num_parameters / 1e9, 2) == 3.57
    for row in rows("ultrascale_nanotron_best"):
        if row["model_b"] != "3.57":
            continue
        dp, tp, pp, zero, micro_batch, accumulation = ints(
            row, "dp", "tp", "pp", "zero", "mbs", "gas"
        )
        plan = cost.ParallelismConfig(
            dp=dp, tp=tp, pp=pp, zero_stage=zero, sequence_parallel=tp > 1
        )
        step = cost.predict_step(
            model=model,
            parallelism=plan,
            node=cost.DGX_H100,
            global_batch=256,
            micro_batch=micro_batch,
            fused_attention=True,
            dropout=False,
        )
        memory = cost.memory_per_gpu(
            model=model,
            parallelism=plan,
            micro_batch=micro_batch,
            num_microbatches=accumulation,
            states=cost.state_bytes(precision="bf16_fp32_grads"),
            fused_attention=True,
        )
        assert memory.total / 1e9 == pytest.approx(float(row["mem_gb"]), rel=0.25)
        if int(row["gpus"]) <= 128:
            assert 100 * step.mfu == pytest.approx(float(row["mfu_pct"]), rel=0.16)


def test_korthikanti_layer_times():
    """One 22 B layer on 8 A100: forward 7.7 ms, forward and backward 19.6 ms without recomputation.
    Their backward overlaps its all-reduces, ours does not."""
    times = {
        row["experiment"]: float(row["combined_ms"]) for row in rows("korthikanti2022_table4_layer")
    }
    for experiment, options in (
        ("baseline no recompute", {}),
        ("baseline with recompute", {"recompute": "full"}),
        ("selective recompute", {"recompute": "selective"}),
    ):
        steps = [
            cost.predict_step(
                model=cost.megatron_gpt(width=6144, num_layers=layers, num_heads=64),
                parallelism=cost.ParallelismConfig(tp=8),
                node=cost.DGX_A100,
                global_batch=4,
                micro_batch=4,
                **options,
            )
            for layers in (24, 48)
        ]
        few, many = (step.compute_s + step.tensor_s for step in steps)
        assert (many - few) / 24 * 1e3 == pytest.approx(times[experiment], rel=0.06), experiment


# ------------------------------------------------------------------------------------- collectives


def sweep(system: str) -> tuple[int, int, list[float], list[float]]:
    """(ranks, nodes, bytes, seconds) of one published all-reduce sweep."""
    found = [row for row in rows("nccl_allreduce_sweeps") if row["system"] == system]
    gpus, nodes = ints(found[0], "gpus", "nodes")
    sizes = [float(row["bytes"]) for row in found]
    seconds = [
        cost.seconds_from_bus_bandwidth(
            kind="all_reduce",
            num_bytes=size,
            bus_bytes_per_s=float(row["busbw_gbps"]) * 1e9,
            num_ranks=gpus,
        )
        for size, row in zip(sizes, found, strict=True)
    ]
    return gpus, nodes, sizes, seconds


def test_alpha_beta_against_a_published_sweep():
    """8 x A100, ring with the constants of hardware.py and nothing fitted: mean error 16 %, at most
    46 % (near 1 MiB, where NCCL changes protocols), 1 % from 1 GiB on."""
    gpus, _, sizes, seconds = sweep("A100-SXM NVLink3")
    predicted = [
        cost.all_reduce_seconds(num_bytes=size, num_ranks=gpus, link=cost.NVLINK3.attainable)
        for size in sizes
    ]
    errors = [p / t - 1 for p, t in zip(predicted, seconds, strict=True)]
    assert mean(abs(e) for e in errors) < 0.17
    assert max(abs(e) for e in errors) < 0.47
    assert all(abs(e) < 0.02 for e, size in zip(errors, sizes, strict=True) if size >= 2**30)


@pytest.mark.parametrize(
    ("system", "mean_error", "bandwidth", "latency_us"),
    [
        ("A100-SXM NVLink3", 0.16, 211e9, 4.0),
        ("H200 NVLink4 (NVLS on)", 0.09, 444e9, 3.0),
        ("B200 NVLink5 (P6-B200)", 0.13, 718e9, 3.8),
    ],
)
def test_fit_to_published_sweeps(
    system: str, mean_error: float, bandwidth: float, latency_us: float
):
    """Two numbers explain 20 sizes over six orders of magnitude to 9 to 16 % on average."""
    gpus, _, sizes, seconds = sweep(system)
    fit = cost.fit_link(num_bytes=sizes, seconds=seconds, num_ranks=gpus)
    assert fit.mean_rel_error < mean_error
    assert fit.link.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.01)
    assert fit.link.latency_s * 1e6 == pytest.approx(latency_us, rel=0.05)


def test_nccl_model_against_sweeps():
    """NCCL's own model is for choosing: right for large buffers (3 % from 1 GiB on), 2 to 5 times
    too fast for small ones, where launching the kernel (some 30 us) is all there is."""
    for system in ("A100-SXM NVLink3", "H200 NVLink4 (NVLS on)"):
        gpus, nodes, sizes, seconds = sweep(system)
        bus = max(
            cost.bus_bandwidth(kind="all_reduce", num_bytes=b, seconds=t, num_ranks=gpus)
            for b, t in zip(sizes, seconds, strict=True)
        )
        for size, measured in zip(sizes, seconds, strict=True):
            predicted = cost.nccl.choose(
                num_bytes=size, gpus_per_node=gpus // nodes, num_nodes=nodes, bus_bytes_per_s=bus
            ).seconds
            if size >= 2**30:
                assert predicted == pytest.approx(measured, rel=0.03)
            if size <= 2**18:
                assert 2 < measured / predicted < 5


def test_attainable_fractions_are_measured_ones():
    """hardware.py's attainable fractions against the largest buffers of the published tables."""
    best = {row["system"]: float(row["busbw_gbps"]) for row in rows("nccl_allreduce_sweeps")}
    assert cost.NVLINK3.attainable_fraction == pytest.approx(
        best["A100-SXM NVLink3"] / 300, abs=0.01
    )
    assert cost.NVLINK4.attainable_fraction == pytest.approx(
        best["H200 NVLink4 ring (NVLS off)"] / 450, abs=0.01
    )
    assert cost.INFINIBAND_NDR.attainable_fraction == pytest.approx(
        best["H200 4-node p5en EFA"] / 400, abs=0.01
    )
    for row in rows("nccl_h200_collectives_16gib"):
        if row["algo"] == "Ring":
            assert float(row["busbw_gbps"]) / 450 == pytest.approx(0.82, abs=0.02)
    for row in rows("nccl_h200_gpu_count_8gib"):  # bus bandwidth does not depend on the ranks
        assert float(row["busbw_nvls_off"]) / 450 == pytest.approx(0.81, abs=0.01)
