"""The first rank of every machine writes --out.

loses: script
"""


# %% replaces="task5_script" tags=["active-ipynb"]
# %%rank 0
# %%writefile train_ddp.py
# """Trains a small regression network on all ranks that torchrun starts."""
#
# import argparse
# import os
#
# import numpy as np
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.nn.parallel import DistributedDataParallel
# from torch.utils.data import DataLoader, TensorDataset
# from torch.utils.data.distributed import DistributedSampler
#
#
# def main():
#     parser = argparse.ArgumentParser()
#     parser.add_argument("--data", required=True)  # .npz with x, y and p0 … p3
#     parser.add_argument("--out", required=True)  # .npz for the trained p0 … p3 and the losses
#     parser.add_argument("--epochs", type=int, required=True)
#     parser.add_argument("--batch-size", type=int, required=True)  # of one rank
#     parser.add_argument("--lr", type=float, required=True)
#     args = parser.parse_args()
#     ### BEGIN SOLUTION
#     local_rank = int(os.environ["LOCAL_RANK"])
#     use_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
#     device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
#     if use_cuda:
#         torch.cuda.set_device(device)
#     dist.init_process_group("nccl" if use_cuda else "gloo")
#
#     data = np.load(args.data)
#     dataset = TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))
#     hidden, inputs = data["p0"].shape
#     model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
#     with torch.no_grad():
#         for i, param in enumerate(model.parameters()):
#             param.copy_(torch.from_numpy(data[f"p{i}"]))
#     model = DistributedDataParallel(
#         model.to(device), device_ids=[local_rank] if use_cuda else None
#     )
#
#     sampler = DistributedSampler(dataset)
#     loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
#     optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
#     loss_fn = nn.MSELoss()
#     losses = []
#     for epoch in range(args.epochs):
#         sampler.set_epoch(epoch)
#         totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss sum, sample count
#         for x, y in loader:
#             x, y = x.to(device), y.to(device)
#             optimizer.zero_grad()
#             loss = loss_fn(model(x), y)
#             loss.backward()
#             optimizer.step()
#             totals[0] += loss.detach() * len(x)
#             totals[1] += len(x)
#         dist.all_reduce(totals)
#         losses.append((totals[0] / totals[1]).item())
#
#     if local_rank == 0:
#         params = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
#         np.savez(args.out, losses=np.array(losses), **params)
#     dist.barrier()  # nobody leaves before the file is there
#     dist.destroy_process_group()
#     ### END SOLUTION
#
#
# if __name__ == "__main__":
#     main()
