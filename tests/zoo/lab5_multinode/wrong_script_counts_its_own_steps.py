"""Counts the steps done from where this run began.

loses: node_lost
"""


# %% replaces="task5_script"
# %%rank 0
# %%writefile train_node.py
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
#     local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
#     has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
#     device = torch.device("cuda", local_rank) if has_gpus else torch.device("cpu")
#     if has_gpus:
#         torch.cuda.set_device(device)
#     dist.init_process_group("nccl" if has_gpus else "gloo")
#     rank, world_size = dist.get_rank(), dist.get_world_size()
#     model, optimizer, scheduler = make_training(data, args.lr)
#     model.to(device)
#     ddp = DistributedDataParallel(model, device_ids=[local_rank] if has_gpus else None)
#     losses = []
#     found = load_newest(args.checkpoints)
#     if found is not None:
#         step, state = found
#         model.load_state_dict(state["model"])
#         optimizer.load_state_dict(state["optimizer"])
#         scheduler.load_state_dict(state["scheduler"])
#         losses = list(state["losses"])
#     start = len(losses)
#     part = args.batch_size // world_size
#     for step in range(start, args.steps):
#         first = step * args.batch_size + rank * part
#         inputs, targets = x[first : first + part].to(device), y[first : first + part].to(device)
#         optimizer.zero_grad()
#         loss = nn.functional.mse_loss(ddp(inputs), targets)
#         loss.backward()
#         optimizer.step()
#         scheduler.step()
#         mean = loss.detach().clone()
#         dist.all_reduce(mean)
#         losses.append(mean.item() / world_size)
#         if (step + 1) % args.every == 0 and rank == 0:
#             state = {
#                 "model": model.state_dict(),
#                 "optimizer": optimizer.state_dict(),
#                 "scheduler": scheduler.state_dict(),
#                 "losses": losses,
#             }
#             save_checkpoint(args.checkpoints, step + 1 - start, state)
#     if rank == 0:
#         trained = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
#         np.savez(args.out, losses=np.array(losses), **trained)
#     dist.destroy_process_group()
#
#
# if __name__ == "__main__":
#     main()
