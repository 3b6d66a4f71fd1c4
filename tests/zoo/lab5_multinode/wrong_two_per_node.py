"""Takes every node to have two ranks, whatever it is told.

The first process of every node writes the result, and the losses before the break are forgotten.

loses: node_script, node_lost, hier_slow_bytes, hier_local_bytes
because: three slips: who writes, which losses are kept, and the size of a node.
"""


# %% replaces="task7_hierarchy"
class HierarchicalAllReduce:
    """Sums a tensor over all ranks; between nodes travels only 1/local_size of it per rank."""

    def __init__(self, local_size: int):
        """Makes the groups, for nodes of `local_size` neighbouring ranks."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_size = 2
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

        flat.copy_(padded[: flat.numel()])
        return tensor


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
#     losses, begin_step = [], 0
#     found = load_newest(args.checkpoints)  # every rank reads it: they share the folder
#     if found is not None:
#         begin_step, state = found
#         model.load_state_dict(state["model"])
#         optimizer.load_state_dict(state["optimizer"])
#         scheduler.load_state_dict(state["scheduler"])
#     ddp = DistributedDataParallel(model, device_ids=[device] if use_cuda else None)
#
#     share = args.batch_size // world_size
#     for step in range(begin_step, args.steps):
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
#     if os.environ["LOCAL_RANK"] == "0":
#         params = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
#         np.savez(args.out, losses=np.array(losses), **params)
#     dist.barrier()  # nobody leaves before the file is there
#     dist.destroy_process_group()
#
#
# if __name__ == "__main__":
#     main()
