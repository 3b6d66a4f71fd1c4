"""One small mistake in most tasks.

Ranks dealt out like cards; node 0's command everywhere; the wider network; gives up when the newest
checkpoint is damaged; keeps one too many; no scheduler; torch's random numbers alone; step 0 again;
a script that forgets the schedule; no warm-up; bytes for bits; the sum in a new tensor; a hook that
never divides.

loses: node_places, node_command, node_interface, ckpt_atomic, ckpt_damage, ckpt_keep,
    resume_training, resume_rng, resume_sampler, node_lost, link_measure, link_bus, hier_values,
    hier_hook
because: one slip in most tasks, each of which loses its own criterion; one checkpoint too many
    stays after a death, too.
"""


# %% replaces="task1_places"
def locate(rank, local_sizes):
    return rank % len(local_sizes), rank // len(local_sizes)


def global_rank(node_rank, local_rank, local_sizes):
    return local_rank * len(local_sizes) + node_rank


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
    return [
        "torchrun",
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={local_size}",
        "--node-rank=0",
        f"--master-addr={head}",
        f"--master-port={port}",
        f"--max-restarts={max_restarts}",
        *script,
    ]


# %% replaces="task2_network"
def network_env(interfaces: dict[str, list[str]], peer: str) -> dict[str, str]:
    """The variables that make gloo and NCCL use the interface which leads to `peer`."""
    address = ipaddress.ip_address(peer)
    leads_there = [
        (network.prefixlen, name)
        for name, addresses in interfaces.items()
        for network in (ipaddress.ip_interface(text).network for text in addresses)
        if address in network
    ]
    if not leads_there:
        raise ValueError(f"no interface of {sorted(interfaces)} leads to {peer}")
    _, name = min(leads_there)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


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
#     # 1. Everything into a file of another name, and that onto the disk.
#     temporary = path.with_name(path.name + ".tmp")
#     with open(temporary, "wb") as file:
#         file.write(hashlib.sha256(data).digest())  # 32 bytes
#         file.write(data)
#         file.flush()
#         os.fsync(file.fileno())
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
#     for old in sorted(folder.glob("step-*.ckpt"))[: -keep - 1]:
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
#         digest, data = content[:32], content[32:]
#         if hashlib.sha256(data).digest() != digest:
#             print(f"{path.name} is damaged, trying the one before")
#             return None
#         step = int(path.stem.removeprefix("step-"))
#         return step, torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
#     return None


# %% replaces="task4_resume"
def collect_state(training: Training) -> dict:
    """Everything that decides the next step, on all ranks; every rank has to call it."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    mine = {
        "torch": torch.get_rng_state(),
        "numpy": (name, keys.tolist(), position, has_gauss, gauss),
        "python": random.getstate(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "epoch": training.sampler.epoch,
        "position": training.sampler.position,
        "step": training.step,
        "random": everyone,
    }


def restore_state(training: Training, state: dict) -> None:
    """Puts into `training` what `collect_state` returned on rank 0."""
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.sampler.epoch = state["epoch"]
    training.sampler.position = state["position"]

    mine = state["random"][dist.get_rank()]
    torch.set_rng_state(mine["torch"])
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
#         losses = state["losses"]
#     ddp = DistributedDataParallel(model, device_ids=[device] if use_cuda else None)
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
        seconds = []
        for _ in range(warmup + repeats):
            began = clock()
            exchange(num_bytes)
            seconds.append(clock() - began)
        medians.append(statistics.median(seconds))
    line = statistics.linear_regression(sizes, medians)
    return line.intercept, 1 / line.slope


def bus_bandwidth(kind: str, num_bytes: int, seconds: float, num_ranks: int) -> float:
    """What every link carried during a collective, in Gbit/s."""
    factor = {
        "all_reduce": 2 * (num_ranks - 1) / num_ranks,
        "all_gather": (num_ranks - 1) / num_ranks,
        "reduce_scatter": (num_ranks - 1) / num_ranks,
        "broadcast": 1.0,
    }[kind]
    return factor * num_bytes / seconds / 1e9


# %% replaces="task7_hierarchy"
class HierarchicalAllReduce:
    """Sums a tensor over all ranks; between nodes travels only 1/local_size of it per rank."""

    def __init__(self, local_size: int):
        """Makes the groups, for nodes of `local_size` neighbouring ranks."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size % local_size:
            raise ValueError(f"{world_size} ranks do not make nodes of {local_size}")
        self.local_size = local_size

        # All ranks make all groups, in the same order, and keep the two that they are in.
        for first in range(0, world_size, local_size):
            ranks = list(range(first, first + local_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.inside = group
        for local_rank in range(local_size):
            ranks = list(range(local_rank, world_size, local_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.across = group

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Puts the sum over all ranks into `tensor`."""
        flat = tensor.detach().view(-1)
        part_size = -(-flat.numel() // self.local_size)  # rounded up
        padded = flat.new_zeros(part_size * self.local_size)
        padded[: flat.numel()] = flat

        part = flat.new_empty(part_size)
        reduce_scatter_single(part, padded, group=self.inside)
        dist.all_reduce(part, group=self.across)
        all_gather_single(padded, part, group=self.inside)

        return padded[: flat.numel()].view(tensor.shape)


# %% replaces="task7_hook"
def all_reduce_hook(
    all_reduce: Callable[[torch.Tensor], torch.Tensor], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for DDP: the mean over ranks, by means of `all_reduce`."""
    flat = bucket.buffer()
    all_reduce(flat)
    future = torch.futures.Future()
    future.set_result(flat)
    return future
