"""The last rank saves.

loses: node_script
"""

# %% replaces="task5_script"
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
#     ### BEGIN SOLUTION
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
#         if rank == world_size - 1 and (step + 1) % args.every == 0:
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
#     ### END SOLUTION
#
#
# if __name__ == "__main__":
#     main()
