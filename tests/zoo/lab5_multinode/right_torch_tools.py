"""torch's own tools: state dicts of distributed checkpointing, torch.save around the bytes of
torch.save, a DeviceMesh made in the first call, and a reduce-scatter made of all-to-all and a sum.
Only rank 0 gathers the random numbers.

loses: nothing
class: example
"""


# %% replaces="task4_resume"
def collect_state(training):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(training.model, training.optimizer)
    numbers = np.random.get_state(legacy=False)
    numbers["state"]["key"] = torch.from_numpy(numbers["state"]["key"].astype(np.int64))
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    mine = [torch.random.get_rng_state(), numbers, random.getstate(), gpus]
    all_numbers = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, all_numbers, dst=0)
    sampler = vars(training.sampler)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": training.scheduler.state_dict(),
        "sampler": {key: sampler[key] for key in ("epoch", "position")},
        "step": training.step,
        "numbers": dict(enumerate(all_numbers or [])),
    }


def restore_state(training, state):
    from torch.distributed.checkpoint.state_dict import set_state_dict

    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    training.scheduler.load_state_dict(state["scheduler"])
    vars(training.sampler).update(state["sampler"])
    training.step = state["step"]
    torch_numbers, numbers, python, gpus = state["numbers"][dist.get_rank()]
    numbers["state"]["key"] = numbers["state"]["key"].numpy().astype(np.uint32)
    torch.random.set_rng_state(torch_numbers)
    if gpus:
        torch.cuda.set_rng_state_all(gpus)
    np.random.set_state(numbers)
    random.setstate(python)


# %% replaces="task3_checkpointing" tags=["active-ipynb"]
# %%rank 0
# %%writefile checkpointing.py
# import hashlib
# import io
# import os
# import shutil
# from pathlib import Path
#
# import torch
#
#
# def save_checkpoint(folder, step, state, keep=3):
#     folder = Path(folder)
#     folder.mkdir(parents=True, exist_ok=True)
#     inner = io.BytesIO()
#     torch.save(state, inner)
#     content = inner.getvalue()
#     scratch = folder / "scratch"
#     shutil.rmtree(scratch, ignore_errors=True)
#     scratch.mkdir()
#     torch.save({"sum": hashlib.blake2b(content).hexdigest(), "content": content}, scratch / "new")
#     os.sync()
#     shutil.move(scratch / "new", folder / f"step-{step:08d}.ckpt")
#     scratch.rmdir()
#     for old in sorted(folder.glob("step-????????.ckpt"), reverse=True)[keep:]:
#         old.unlink(missing_ok=True)
#     return folder / f"step-{step:08d}.ckpt"
#
#
# def load_newest(folder):
#     best = None
#     for path in sorted(Path(folder).glob("step-????????.ckpt")):
#         try:
#             outer = torch.load(path, weights_only=True)
#             if hashlib.blake2b(outer["content"]).hexdigest() == outer["sum"]:
#                 state = torch.load(io.BytesIO(outer["content"]), map_location="cpu")
#                 best = int(path.stem[-8:]), state
#         except Exception:
#             continue
#     return best


# %% replaces="task7_hierarchy"
class HierarchicalAllReduce:
    def __init__(self, local_size):
        self.local_size, self.inside, self.across = local_size, None, None

    def make_groups(self):
        from torch.distributed.device_mesh import init_device_mesh

        shape = (dist.get_world_size() // self.local_size, self.local_size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))
        self.inside, self.across = mesh.get_group("local"), mesh.get_group("node")

    def __call__(self, tensor):
        if self.inside is None:
            self.make_groups()
        size = self.local_size
        flat = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % size))
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=self.inside)
        part = received.view(size, -1).sum(dim=0)
        dist.all_reduce(part, group=self.across)
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part, group=self.inside)
        tensor.copy_(torch.cat(parts)[: tensor.numel()].view_as(tensor))
        return tensor


# %% replaces="task7_hook"
def all_reduce_hook(all_reduce, bucket):
    mean = all_reduce(bucket.buffer() / dist.get_world_size())
    done = torch.futures.Future()
    done.set_result([mean])
    return done.then(lambda future: future.value()[0])
