"""The torch-native way against stock torch in one process, and the map from FSDP1 to FSDP2."""

from __future__ import annotations

import dataclasses
import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from zero_helper import Gpt, Plain, build, compare, train

from minidist.launch import run
from minidist.parallel.fsdp import (
    FSDP1_OPTIONS,
    clip_grad_norm_,
    fsdp1_to_fsdp2,
    full_state_dict,
    initialise,
    load_full_state_dict,
    load_sharded,
    no_sync,
    save_sharded,
    shard_model,
)
from minidist.parallel.zero import count_bytes, formula_bytes


class Native(Plain):
    def wrap(self, model):
        self.model = shard_model(model, lambda m: m.blocks, **self.options)
        return self.model

    def clip(self, model, max_norm, norm_type):
        return clip_grad_norm_(model, max_norm, norm_type).item()

    def no_sync(self):
        return no_sync(self.model)

    def values(self, model):
        whole = full_state_dict(model)["model"]
        received = [whole]
        dist.broadcast_object_list(received, src=0)
        return received[0]

    def optimizer_state(self):
        return {}


CASES = {
    "adamw": {},
    "tied": {"config": {"tied": True}},
    "tied and frozen": {"model": "frozen"},
    "clip, no sync": {"accumulate": 3, "skip_sync": True, "clip": (0.05, 2.0)},
}
OPTIONS = {
    "kept after forward": {"reshard_after_forward": False},
    "offload": {"offload": True},
}


def train_all():
    dist.init_process_group("gloo")
    n = dist.get_world_size()
    done = {}
    for name, case in CASES.items():
        done["default", name] = train(Native(), **case)
    options = dict(OPTIONS)
    for replicas in range(2, n + 1):
        if n % replicas == 0:
            for name, case in CASES.items():
                done[f"{replicas} replicas", name] = train(Native(replicas=replicas), **case)
    if n % 2 == 0:
        options["own mesh"] = {
            "mesh": init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("outer", "inner"))
        }
    for option, arguments in options.items():
        done[option, "adamw"] = train(Native(**arguments))
    dist.barrier()
    dist.destroy_process_group()
    return done


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_steps_equal_one_process(world_size):
    results = run(train_all, world_size, deadline_s=200)
    for option, name in results[0]:
        compare([rank[option, name] for rank in results], train(Plain(), **CASES[name]))


def share(batch):
    return [Plain().share(part) for part in batch]


def steps(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model(*share(batch)).backward()
        optimizer.step()


def make(meta=False):
    with torch.device("meta" if meta else "cpu"):
        model = Gpt().double()
    if meta:
        model = shard_model(model, lambda m: m.blocks)
        torch.manual_seed(7)
        initialise(model, "cpu")
    else:
        model = shard_model(build(), lambda m: m.blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)


def save(folder):
    dist.init_process_group("gloo")
    model, optimizer = make()
    steps(model, optimizer, Gpt.batches(10)[:4])
    save_sharded(folder, model, optimizer)
    state = full_state_dict(model, optimizer)
    dist.barrier()
    dist.destroy_process_group()
    return state


def go_on(folder, state):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    for how in ("sharded", "full"):
        model, optimizer = make()
        if how == "sharded":
            load_sharded(folder, model, optimizer)
        else:
            load_full_state_dict(model, state if rank == 0 else {}, optimizer)
        steps(model, optimizer, Gpt.batches(10)[4:])
        found[how] = full_state_dict(model)["model"]
    # The meta device: the same values as a whole model has, and it trains.
    model, optimizer = make(meta=True)
    found["meta"] = full_state_dict(model)["model"]
    steps(model, optimizer, Gpt.batches(1))
    # Mixed precision, and memory by the formula.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wide = Gpt(vocab_size=32, width=64, num_layers=4)
    model = shard_model(wide, lambda m: m.blocks, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    model(*share(Gpt.batches(1)[0])).backward()
    optimizer.step()
    assert {(p.dtype, p.grad.dtype) for p in model.parameters()} == {(torch.float32,) * 2}
    num_params = sum(p.numel() for p in model.parameters())
    formula = formula_bytes(num_params, dist.get_world_size(), stage=3)
    assert count_bytes(model, optimizer).total == pytest.approx(formula.total, rel=0.05)
    # Wrong use.
    with pytest.raises(ValueError, match="3 replicas of 2 ranks"):
        shard_model(build(), replicas=3)
    with pytest.raises(ValueError, match="of 2 with names"):
        shard_model(build(), mesh=init_device_mesh("cpu", (2, 1)))
    with pytest.raises(ValueError, match="no replicas"):
        shard_model(build(), mesh=init_device_mesh("cpu", (2,)), replicas=2)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_state_dicts_meta_device_and_memory(tmp_path):
    saved = run(save, 3, str(tmp_path))
    assert [bool(each["model"]) for each in saved] == [True, False, False]
    results = run(go_on, 2, str(tmp_path), saved[0])
    expected = train(Plain(), steps=10)["values"]
    for how in ("sharded", "full"):
        assert list(results[0][how]) == list(expected)
        assert results[1][how] == {}
        for name, value in expected.items():
            torch.testing.assert_close(results[0][how][name], value, rtol=1e-9, atol=1e-12)
    whole = Gpt().double()
    torch.manual_seed(7)
    whole.gpt.reset_parameters()
    for name, value in whole.state_dict().items():
        assert torch.equal(results[0]["meta"][name], value), name


def full_state_under_if():
    dist.init_process_group("gloo")
    # A group of its own, so that only the wait that never ends has a short timeout.
    short = dist.new_group(timeout=timedelta(seconds=15))
    mesh = DeviceMesh.from_group(short, "cpu")
    model = shard_model(build(), lambda m: m.blocks, mesh=mesh)
    dist.barrier()
    outcome = "not called"
    if dist.get_rank() == 0:  # what the docstring of state.py warns of
        try:
            full_state_dict(model)
            outcome = "returned"
        except RuntimeError:
            outcome = "timed out"
    dist.barrier()
    return outcome


def test_a_full_state_dict_on_one_rank_only_never_returns():
    assert run(full_state_under_if, 2) == ["timed out", "not called"]


# -- the map -------------------------------------------------------------------------------------


def test_every_option_of_fsdp1_is_in_the_map():
    arguments = set(inspect.signature(FullyShardedDataParallel.__init__).parameters)
    arguments -= {"self", "module"}
    methods = {"state_dict_type", "no_sync", "clip_grad_norm_", "summon_full_params"}
    assert {option.name for option in FSDP1_OPTIONS} == arguments | methods
    assert all(hasattr(FullyShardedDataParallel, name) for name in methods)
    assert all(option.reason for option in FSDP1_OPTIONS)


def test_options_are_translated():
    known = set(inspect.signature(fully_shard).parameters)
    layer = nn.Linear(2, 2)
    plan = fsdp1_to_fsdp2(
        {
            "sharding_strategy": ShardingStrategy.FULL_SHARD,
            "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
            "cpu_offload": CPUOffload(offload_params=True),
            "ignored_modules": [layer],
            "forward_prefetch": True,
            "backward_prefetch": "BACKWARD_PRE",
            "limit_all_gathers": True,
            "sync_module_states": False,
        }
    )
    assert set(plan.arguments) <= known
    assert plan.arguments["reshard_after_forward"] is True
    assert plan.arguments["mp_policy"] == MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, cast_forward_inputs=False
    )
    assert isinstance(plan.arguments["offload_policy"], CPUOffloadPolicy)
    assert plan.arguments["ignored_params"] == set(layer.parameters())
    root, buffers, norms, prefetch = plan.steps
    assert "cast_forward_inputs=True" in root
    assert "b.data.to(torch.bfloat16)" in buffers
    assert "_BatchNorm" in norms
    assert prefetch == "model.set_modules_to_forward_prefetch([…])"
    assert len(plan.reasons) == 8
    hybrid = {"sharding_strategy": "_HYBRID_SHARD_ZERO2"}
    plan = fsdp1_to_fsdp2(hybrid, world_size=6, ranks_per_node=2)
    assert (plan.mesh_shape, plan.arguments) == ((3, 2), {"reshard_after_forward": False})
    with pytest.raises(ValueError, match="NO_SHARD shards nothing: use DistributedDataParallel"):
        fsdp1_to_fsdp2({"sharding_strategy": "NO_SHARD"})
    with pytest.raises(ValueError, match=r"is one of FULL_SHARD, .* got 'FULL'"):
        fsdp1_to_fsdp2({"sharding_strategy": "FULL"})
    with pytest.raises(ValueError, match="not a switch"):
        fsdp1_to_fsdp2({"mixed_precision": True})
    with pytest.raises(ValueError, match="no option zero_stage"):
        fsdp1_to_fsdp2({"zero_stage": 3})
    with pytest.raises(ValueError, match="multiple of ranks_per_node, got 6 and 4"):
        fsdp1_to_fsdp2(hybrid, world_size=6, ranks_per_node=4)


def test_every_field_of_fsdp1s_mixed_precision_is_translated():
    """To a field of the policy, or to a step that says what to do instead: none is dropped."""
    plain = MixedPrecision(
        param_dtype=None, cast_root_forward_inputs=False, _module_classes_to_ignore=()
    )
    before = fsdp1_to_fsdp2({"mixed_precision": plain})
    assert before.steps == ()
    changes = {
        "param_dtype": torch.float16,
        "reduce_dtype": torch.float16,
        "buffer_dtype": torch.float16,
        "keep_low_precision_grads": True,
        "cast_forward_inputs": True,
        "cast_root_forward_inputs": True,
        "_module_classes_to_ignore": (nn.BatchNorm1d,),
    }
    assert set(changes) == {field.name for field in dataclasses.fields(MixedPrecision)}
    for name, value in changes.items():
        base = plain
        if name == "_module_classes_to_ignore":  # says something where there is a dtype to ignore
            base = dataclasses.replace(plain, param_dtype=torch.float16)
            before = fsdp1_to_fsdp2({"mixed_precision": base})
        after = fsdp1_to_fsdp2({"mixed_precision": dataclasses.replace(base, **{name: value})})
        changed = (after.arguments, after.steps) != (before.arguments, before.steps)
        assert changed, f"{name} is dropped without a word"
    both = {"ignored_modules": [nn.Linear(1, 1)], "ignored_states": [nn.Parameter(torch.ones(1))]}
    assert len(fsdp1_to_fsdp2(both).arguments["ignored_params"]) == 3


def train_translated():
    dist.init_process_group("gloo")
    n = dist.get_world_size()
    done = []
    for strategy in ShardingStrategy:
        if strategy is ShardingStrategy.NO_SHARD:
            mesh = init_device_mesh("cpu", (n, 1), mesh_dim_names=("replicate", "shard"))
            arguments = {"mesh": mesh}
        else:
            plan = fsdp1_to_fsdp2({"sharding_strategy": strategy}, world_size=n, ranks_per_node=2)
            names = ("replicate", "shard")
            mesh = None
            if plan.mesh_shape:
                mesh = init_device_mesh("cpu", plan.mesh_shape, mesh_dim_names=names)
            arguments = {"mesh": mesh, **plan.arguments}
        engine = Native(**arguments)
        result = train(engine, steps=3)
        placements = next(engine.model.parameters())
        assert isinstance(placements, DTensor)
        done.append(result)
    dist.barrier()
    dist.destroy_process_group()
    return done


def test_translated_strategies_train():
    expected = train(Plain(), steps=3)
    results = run(train_translated, 4)
    for i in range(len(results[0])):
        compare([rank[i] for rank in results], expected)
