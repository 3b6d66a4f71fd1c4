"""Guesses: --nproc-per-node counts the whole job, the checksum is a file of its own that is
replaced first, no fsync, parameters without buffers, a NumPy array in the state, gradients that
are never averaged, the smallest message's time as the latency, and leaders that send everything.

loses: node_command, ckpt_roundtrip, ckpt_atomic, ckpt_durable, resume_training, resume_rng,
    node_script, node_lost, link_measure, hier_slow_bytes, hier_local_bytes
status: resume_rng STUDENT_ERROR
because: one slip in nearly every task; gradients that are never averaged give every rank a model
    of its own, which no checkpoint of rank 0 can bring back.
"""


# %% replaces="task1_command"
def node_command(
    script: list[str],
    *,
    num_nodes: int,
    local_size: int,
    node_rank: int,
    head: str,
    port: int,
    run_id: str,
    max_restarts: int = 0,
) -> list[str]:
    """The torchrun command of node `node_rank` of a job, as a list of words."""
    # node_rank is not needed: with c10d the agents agree on it when they meet.
    return [
        "torchrun",
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={num_nodes * local_size}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={head}:{port}",
        f"--rdzv-id={run_id}",
        f"--max-restarts={max_restarts}",
        *script,
    ]


# %% replaces="task3_checkpointing" tags=["active-ipynb"]
# %%rank 0
# %%writefile checkpointing.py
# """Checkpoints that survive the death of a process, of a node, and of a few bits."""
#
# import hashlib
# import io
# import os
# from pathlib import Path
#
# import torch
#
#
# def save_checkpoint(folder, step, state, keep=3):
#     """Saves `state` as FOLDER/step-00000012.ckpt, whole or not at all; returns the path.
#
#     Then deletes the oldest checkpoints, so that the newest `keep` are left.
#     """
#     folder = Path(folder)
#     folder.mkdir(parents=True, exist_ok=True)
#     path = folder / f"step-{step:08d}.ckpt"
#
#     buffer = io.BytesIO()
#     torch.save(state, buffer)
#     data = buffer.getvalue()
#
#     path.with_suffix(".sha256").write_bytes(hashlib.sha256(data).digest())
#     # 1. Everything into a file of another name, and that onto the disk.
#     temporary = path.with_name(path.name + ".tmp")
#     with open(temporary, "wb") as file:
#         file.write(data)
#
#     # 2. The name, all at once; and the folder's list of names onto the disk too.
#     os.replace(temporary, path)
#     fd = os.open(folder, os.O_RDONLY)
#     try:
#         os.fsync(fd)
#     finally:
#         os.close(fd)
#
#     # 3. Only now may old ones go. Names have eight digits, so their order is that of the steps.
#     for old in sorted(folder.glob("step-*.ckpt"))[:-keep]:
#         old.unlink()
#     return path
#
#
# def load_newest(folder):
#     """(step, state) of the newest checkpoint that is whole, tensors on the CPU; None without one.
#
#     A damaged one is passed over, and the one before it is tried.
#     """
#     for path in sorted(Path(folder).glob("step-*.ckpt"), reverse=True):
#         content = path.read_bytes()
#         digest, data = path.with_suffix(".sha256").read_bytes(), content
#         if hashlib.sha256(data).digest() != digest:
#             print(f"{path.name} is damaged, trying the one before")
#             continue
#         step = int(path.stem.removeprefix("step-"))
#         return step, torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
#     return None


# %% replaces="task4_resume"
def collect_state(training: Training) -> dict:
    """Everything that decides the next step, on all ranks; every rank has to call it."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    mine = {
        "torch": torch.get_rng_state(),
        "numpy": (name, keys, position, has_gauss, gauss),
        "python": random.getstate(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {
        "model": dict(training.model.named_parameters()),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "epoch": training.sampler.epoch,
        "position": training.sampler.position,
        "step": training.step,
        "random": everyone,
    }


def restore_state(training: Training, state: dict) -> None:
    """Puts into `training` what `collect_state` returned on rank 0."""
    training.model.load_state_dict(state["model"], strict=False)
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["scheduler"])
    training.sampler.epoch = state["epoch"]
    training.sampler.position = state["position"]
    training.step = state["step"]

    mine = state["random"][dist.get_rank()]
    torch.set_rng_state(mine["torch"])
    np.random.set_state(mine["numpy"])
    random.setstate(mine["python"])
    if mine["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])


# %% replaces="task5_script" tags=["active-ipynb"]
# %%rank 0
# %%writefile train_node.py
# """Trains a small regression network on all nodes; goes on from the newest checkpoint."""
#
# import argparse
# import os
#
# import numpy as np
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.nn.parallel import DistributedDataParallel
#
# from checkpointing import load_newest, save_checkpoint
#
#
# def make_training(data, lr):
#     """Model, optimizer and scheduler as they are before the first step."""
#     hidden, inputs = data["p0"].shape
#     model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
#     with torch.no_grad():
#         for i, param in enumerate(model.parameters()):
#             param.copy_(torch.from_numpy(data[f"p{i}"]))
#     optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
#     scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10 / (10 + step))
#     return model, optimizer, scheduler
#
#
# def main():
#     parser = argparse.ArgumentParser()
#     parser.add_argument("--data", required=True)  # .npz with x, y and p0 … p3
#     parser.add_argument("--out", required=True)  # .npz for the trained p0 … p3 and all losses
#     parser.add_argument("--checkpoints", required=True)  # a folder that all nodes see
#     parser.add_argument("--steps", type=int, required=True)  # in all, earlier runs included
#     parser.add_argument("--every", type=int, required=True)  # steps between checkpoints
#     parser.add_argument("--batch-size", type=int, required=True)  # of all ranks together
#     parser.add_argument("--lr", type=float, required=True)
#     args = parser.parse_args()
#     data = np.load(args.data)
#     x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
#     use_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
#     device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else "cpu"
#     if use_cuda:
#         torch.cuda.set_device(device)
#     dist.init_process_group("nccl" if use_cuda else "gloo")
#     rank, world_size = dist.get_rank(), dist.get_world_size()
#
#     model, optimizer, scheduler = make_training(data, args.lr)
#     model = model.to(device)
#     losses = []
#     found = load_newest(args.checkpoints)  # every rank reads it: they share the folder
#     if found is not None:
#         _, state = found
#         model.load_state_dict(state["model"])
#         optimizer.load_state_dict(state["optimizer"])
#         scheduler.load_state_dict(state["scheduler"])
#         losses = state["losses"]
#     ddp = model
#
#     share = args.batch_size // world_size
#     for step in range(len(losses), args.steps):
#         begin = step * args.batch_size + rank * share  # this rank's part of the global batch
#         rows = slice(begin, begin + share)
#         optimizer.zero_grad()
#         loss = nn.functional.mse_loss(ddp(x[rows].to(device)), y[rows].to(device))
#         loss.backward()
#         optimizer.step()
#         scheduler.step()
#
#         mean = loss.detach() / world_size
#         dist.all_reduce(mean)
#         losses.append(mean.item())
#         if rank == 0 and (step + 1) % args.every == 0:
#             state = {
#                 "model": model.state_dict(),
#                 "optimizer": optimizer.state_dict(),
#                 "scheduler": scheduler.state_dict(),
#                 "losses": losses,
#             }
#             save_checkpoint(args.checkpoints, step + 1, state)
#
#     if rank == 0:
#         params = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
#         np.savez(args.out, losses=np.array(losses), **params)
#     dist.barrier()  # nobody leaves before the file is there
#     dist.destroy_process_group()
#
#
# if __name__ == "__main__":
#     main()


# %% replaces="task6_link"
def measure_link(
    exchange: Callable[[int], object],
    sizes: list[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
    warmup: int = 2,
    repeats: int = 5,
) -> tuple[float, float]:
    """(latency_s, bandwidth_bytes_per_s) of what `exchange` sends over."""
    medians = []
    for num_bytes in sizes:
        for _ in range(warmup):
            exchange(num_bytes)
        seconds = []
        for _ in range(repeats):
            began = clock()
            exchange(num_bytes)
            seconds.append(clock() - began)
        medians.append(statistics.median(seconds))
    return medians[0], sizes[-1] / medians[-1]


def bus_bandwidth(kind: str, num_bytes: int, seconds: float, num_ranks: int) -> float:
    """What every link carried during a collective, in Gbit/s."""
    factor = {
        "all_reduce": 2 * (num_ranks - 1) / num_ranks,
        "all_gather": (num_ranks - 1) / num_ranks,
        "reduce_scatter": (num_ranks - 1) / num_ranks,
        "broadcast": 1.0,
    }[kind]
    return factor * num_bytes * 8 / seconds / 1e9


# %% replaces="task7_hierarchy"
class HierarchicalAllReduce:
    def __init__(self, local_size):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for first in range(0, world_size, local_size):
            ranks = list(range(first, first + local_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.inside, self.leader = group, first
        self.leaders = dist.new_group(list(range(0, world_size, local_size)))
        self.is_leader = rank == self.leader

    def __call__(self, tensor):
        dist.reduce(tensor, self.leader, group=self.inside)
        if self.is_leader:
            dist.all_reduce(tensor, group=self.leaders)
        dist.broadcast(tensor, self.leader, group=self.inside)
        return tensor
