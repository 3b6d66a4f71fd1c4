"""The command `minidist`: its answers, its files, and how it tells what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minidist import cost
from minidist.plan.cli import main
from minidist.plan.inputs import InputError, amount, batch_of, from_hugging_face, layout_of

ARGUMENTS = ["--model", "llama3-8b", "--gpus", "64", "--batch-tokens", "4M"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


# ------------------------------------------------------------------------------------- the command


def test_plan_as_json(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(
        capsys, "plan", *ARGUMENTS, "--gpu", "h100", "--tokens", "15T", "--price", "2.5", "--json"
    )
    assert code == 0
    record = json.loads(out)
    assert record["parameters"] == cost.LLAMA3_8B.num_parameters
    assert record["batch_tokens"] == 512 * 8192
    steps = [layout["step_s"] for layout in record["layouts"]]
    assert steps == sorted(steps)
    for layout in record["layouts"]:
        assert sum(layout["seconds"].values()) == pytest.approx(layout["step_s"])
        assert sum(layout["bytes"].values()) == pytest.approx(layout["total_bytes"])
        assert layout["step_s_low"] < layout["step_s"] < layout["step_s_high"]
        assert layout["days"] * 86400 == pytest.approx(
            15e12 / record["batch_tokens"] * layout["step_s"]
        )
        assert layout["dollars"] == pytest.approx(layout["gpu_hours"] * 2.5)


def test_explain_and_compare(capsys: pytest.CaptureFixture[str], tmp_path):
    layout = "dp=16 tp=4 zero=1 micro=2"
    code, out, _ = run(capsys, "explain", *ARGUMENTS, "--layout", layout)
    assert code == 0
    for word in ("computing", "tensor parallelism", "optimizer", "activations", "error bar"):
        assert word in out
    assert re.search(r"Beside the planner's, this layout (loses|ties): ", out)
    code, out, _ = run(capsys, "explain", *ARGUMENTS, "--layout", layout, "--json")
    assert any(note.startswith("Beside the planner's") for note in json.loads(out)["notes"])
    figure = tmp_path / "figure.png"
    code, out, _ = run(
        capsys,
        "compare",
        *ARGUMENTS,
        *("--layout", layout, "--layout", "dp=64 zero=3", "--plot", str(figure)),
    )
    assert code == 0
    assert figure.stat().st_size > 10_000
    assert "GB of optimizer" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama9"], "neither a file nor one of"),
        (["--gpus", "6.5"], "expected a whole number"),
        (["--gpu", "z80"], "'z80' is not one of a100"),
        (["--batch-tokens", "many"], "--batch-tokens: expected a number above 0"),
        (["--batch-tokens", "100"], "less than one sequence of 8,192"),
        (["--seq", "0"], "--seq: expected a number above 0"),
        (["--gpu", "a100", "--precision", "fp8"], "has no fp8"),
        (["--constraint", "tp<8;pp"], "--constraint: expected such as tp<=8"),
        (["--cluster", "nowhere.toml"], "nowhere.toml cannot be read"),
    ],
)
def test_wrong_input_is_told(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    code, out, err = run(capsys, "plan", *ARGUMENTS, *arguments)
    assert code == 2
    assert message in err
    assert not out


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp=16 tp=8", "= 128 GPUs, but --gpus is 64"),
        ("dp=64 tpp=2", "expected words such as dp=8"),
        ("dp=64 micro=3", "global batch 512 = dp 64 x micro-batch 3 x 2 + 128"),
        ("dp=2 pp=32 zero=3", "ZeRO-3 with pp 32"),
        ("dp=64 ep=8", "the model has no experts"),
    ],
)
def test_a_layout_that_cannot_be_is_told(
    capsys: pytest.CaptureFixture[str], layout: str, message: str
):
    code, _, err = run(capsys, "explain", *ARGUMENTS, "--layout", layout)
    assert code == 2
    assert message in err


def test_heads_that_do_not_divide(capsys: pytest.CaptureFixture[str]):
    arguments = ["--model", "llama3-70b", "--gpus", "6", "--batch-tokens", "4M"]
    code, _, err = run(capsys, "explain", *arguments, "--layout", "tp=6")
    assert code == 2
    assert "64 heads do not divide by tp = 6: 64 / 6 = 10.67" in err


def test_nothing_fits(capsys: pytest.CaptureFixture[str]):
    arguments = ["--model", "llama3-405b", "--gpus", "8", "--batch-tokens", "4M"]
    code, _, err = run(capsys, "plan", *arguments)
    assert code == 1
    assert "nothing fits 8 GPUs" in err
    code, _, err = run(capsys, "plan", *ARGUMENTS, "--constraint", "tp=8,pp=8,zero=1,dp=2")
    assert code == 1
    assert "meets the constraints" in err


def test_the_command_needs_no_torch():
    """It starts in a moment, as a process of its own."""
    code = (
        "import sys; from minidist.__main__ import main; sys.argv = ['minidist', *sys.argv[1:]];"
        "code = main(); assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules;"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *ARGUMENTS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "What binds" in done.stdout


# ------------------------------------------------------------------------------------------ inputs


def test_amounts_and_batches():
    assert amount("1.5k", "x") == 1500
    assert batch_of("4M", 4096) == 1024
    assert batch_of("4194304", 8192) == 512
    assert batch_of("1M", 1000) == 1000
    for wrong in ("", "-4", "0", "4X", "nan", "1e400M"):
        with pytest.raises(InputError):
            amount(wrong, "x")


LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("changes", "billions"),
    [
        ({}, 8.030),
        # Qwen3-8B: heads of 128, and its own embedding; without the norms of queries and keys
        (
            {"num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936},
            8.190,
        ),
        # Mixtral 8x7B
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}, 46.703),
        # Qwen3-30B-A3B
        (
            {
                "hidden_size": 2048,
                "num_hidden_layers": 48,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "vocab_size": 151936,
            },
            30.532,
        ),
        # DeepSeek-V3
        (
            {
                "hidden_size": 7168,
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "num_key_value_heads": 128,
                "intermediate_size": 18432,
                "moe_intermediate_size": 2048,
                "n_routed_experts": 256,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "first_k_dense_replace": 3,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128,
                "v_head_dim": 128,
                "vocab_size": 129280,
            },
            671.026,
        ),
    ],
)
def test_hugging_face_configurations(changes: dict, billions: float):
    model = from_hugging_face(LLAMA | changes)
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=1.5e-3)


def test_gpt2_configuration():
    config = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    assert from_hugging_face(config).num_parameters == 124_439_808


def test_a_configuration_without_a_size_is_told(capsys: pytest.CaptureFixture[str], tmp_path):
    for content, message in (
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "no hidden_size or n_embd"),
        (LLAMA | {"num_attention_heads": 33}, "width 4096 is not divisible by 33 heads"),
        (LLAMA | {"vocab_size": "many"}, "vocab_size must be a whole number, got 'many'"),
        ([1], "holds no object with sizes"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        code, _, err = run(capsys, "plan", *ARGUMENTS, "--model", str(tmp_path))
        assert code == 2
        assert message in err


def test_cluster_file(capsys: pytest.CaptureFixture[str], tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('gpu = "h100"\ngpus_per_node = 4\nnetwork_gbit_per_s = 100\nprice = 2\n')
    arguments = [*ARGUMENTS, "--cluster", str(file), "--tokens", "1T", "--json"]
    code, out, _ = run(capsys, "plan", *arguments)
    assert code == 0
    layouts = json.loads(out)["layouts"]
    assert all(layout["layout"]["tp"] <= 4 and "dollars" in layout for layout in layouts)
    for content, message in (
        ("gpus = 8", "unknown entry gpus; known are gpu, name, gpus_per_node"),
        ("memory_gb = -1", "memory_gb must be a number above 0, got -1"),
        ('gpu = "tpu"', "gpu: 'tpu' is not one of"),
        ("gpu", "is not TOML"),
    ):
        file.write_text(content)
        code, _, err = run(capsys, "plan", *arguments)
        assert code == 2
        assert message in err


def test_a_power_limit_in_cluster_toml(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "cluster.toml"
    seconds = []
    for watts in (700, 350):
        file.write_text(f'gpu = "h100"\npower_w = {watts}\n')
        code, out, _ = run(capsys, "plan", *ARGUMENTS, "--cluster", str(file), "--json")
        assert code == 0
        seconds.append(json.loads(out)["layouts"][0]["step_s"])
    assert seconds[1] > 1.1 * seconds[0]
    file.write_text('gpu = "h100"\npower_w = 900\n')
    code, _, err = run(capsys, "plan", *ARGUMENTS, "--cluster", str(file))
    assert code == 2
    assert "power_w: H100 SXM 80 GB at 900 W: expected a power limit above 0 and at most 700" in err


def test_hybrid_sharding_in_words(capsys: pytest.CaptureFixture[str]):
    """A layout with copies of the shards beside one without, and a constraint."""
    wanted = ["--layout", "dp=64 zero=3 micro=1", "--layout", "dp=64 zero=3 replicas=8 micro=1"]
    code, out, _ = run(capsys, "compare", *ARGUMENTS, *wanted, "--json")
    assert code == 0
    layouts = json.loads(out)["layouts"]
    held = {one["layout"]["replicas"]: one["bytes"]["optimizer"] for one in layouts}
    assert held[8] == pytest.approx(8 * held[1])
    arguments = [*ARGUMENTS, "--constraint", "replicas=1", "--json"]
    code, out, _ = run(capsys, "plan", *arguments)
    assert all(one["layout"]["replicas"] == 1 for one in json.loads(out)["layouts"])


def test_zero_bubble_schedules_side_by_side(capsys: pytest.CaptureFixture[str]):
    """ZB-H1 has the memory of 1F1B and a smaller bubble, ZB-H2 a still smaller one for memory."""
    words = "dp=4 pp=4 tp=4 zero=1 recompute=full"
    names = ("1f1b", "zb_h1", "zb_h2")
    wanted = [part for name in names for part in ("--layout", f"{words} schedule={name}")]
    code, out, _ = run(capsys, "compare", *ARGUMENTS, *wanted, "--json")
    assert code == 0
    found = {one["layout"]["schedule"]: one for one in json.loads(out)["layouts"]}
    bubbles = [found[name]["seconds"]["bubble"] for name in names]
    assert bubbles == sorted(bubbles, reverse=True)
    assert len(set(bubbles)) == 3
    kept = [found[name]["bytes"]["activations"] for name in names]
    assert kept[0] == kept[1] < kept[2]
    code, out, _ = run(capsys, "plan", *ARGUMENTS, "--schedule", "zb_h1", "--json")
    assert all(one["layout"]["chunks"] == 1 for one in json.loads(out)["layouts"])
    code, _, err = run(
        capsys, "explain", *ARGUMENTS, "--layout", f"{words} chunks=2 schedule=zb_h1"
    )
    assert code == 2
    assert "zb_h1 has one chunk per stage" in err


def test_layout_words():
    layout = layout_of("dp=4, pp=2 chunks=3 micro=2 recompute=full")
    assert layout.parallelism == cost.ParallelismConfig(dp=4, pp=2, virtual_stages=3)
    assert (layout.micro_batch, layout.recompute) == (2, "full")


# ------------------------------------------------------------------------------------------- trace


@pytest.mark.parametrize(
    "sizes",
    [
        ["--dp", "128", "--tp", "8", "--layers", "2"],  # 1,024 ranks
        ["--dp", "96", "--tp", "2", "--layers", "3", "--micro", "2"],  # 96 divides no table
    ],
)
def test_a_traced_step_is_what_the_sizes_say(capsys: pytest.CaptureFixture[str], sizes: list[str]):
    small = ["--width", "512", "--heads", "8", "--seq", "256"]
    code, out, err = run(capsys, "trace", *small, *sizes, "--json")
    assert code == 0, err
    record = json.loads(out)
    found, expected = record["trace"], record["expected"]
    assert found["calls"] == expected["calls"]
    assert found["num_bytes"] == expected["num_bytes"]
    layers = int(sizes[sizes.index("--layers") + 1])
    assert found["calls"] == {
        "all_gather": 2 * layers + 1,
        "reduce_scatter": layers + 1,
        "all_reduce": 4 * layers + 5,
    }
    model = replace(cost.GPT3_175B, width=512, num_heads=8, context=256, num_layers=layers)
    assert found["parameters"] == model.num_parameters
    gathered = found["num_bytes"]["all_gather"] / (2 * layers + 1)
    assert found["peak_bytes"] > 4 * found["here"] + gathered


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama3-8b"], "runs minidist's GPT"),
        (["--tp", "7"], "heads 96 and vocabulary 51200 must divide by tp 7"),
        (["--dp", "0"], "--dp: expected a number above 0"),
    ],
)
def test_a_trace_that_cannot_be_is_told(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    code, _, err = run(capsys, "trace", *arguments)
    assert code == 2
    assert message in err
