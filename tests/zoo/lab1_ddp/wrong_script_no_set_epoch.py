"""The script never tells the sampler the epoch, so that all epochs have one order.

loses: script
says: script Other parameters give other losses
"""

# %% replaces="task5_script" tags=["active-ipynb"]
# %%rank 0
# %%writefile train_ddp.py
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
#     parser.add_argument("--data", required=True)
#     parser.add_argument("--out", required=True)
#     parser.add_argument("--epochs", type=int, required=True)
#     parser.add_argument("--batch-size", type=int, required=True)
#     parser.add_argument("--lr", type=float, required=True)
#     args = parser.parse_args()
#
#     use_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
#     dist.init_process_group("nccl" if use_cuda else "gloo")
#     device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else "cpu"
#
#     data = np.load(args.data)
#     dataset = TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))
#     hidden, inputs = data["p0"].shape
#     model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
#     with torch.no_grad():
#         for i, param in enumerate(model.parameters()):
#             param.copy_(torch.from_numpy(data[f"p{i}"]))
#     model = DistributedDataParallel(model.to(device))
#
#     sampler = DistributedSampler(dataset)
#     loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
#     optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
#     losses = []
#     for epoch in range(args.epochs):
#         totals = torch.zeros(2, dtype=torch.float64, device=device)
#         for x, y in loader:
#             optimizer.zero_grad()
#             loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
#             loss.backward()
#             optimizer.step()
#             totals += torch.tensor([loss.item() * len(x), len(x)], device=device)
#         dist.all_reduce(totals)
#         losses.append((totals[0] / totals[1]).item())
#
#     if dist.get_rank() == 0:
#         params = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
#         np.savez(args.out, losses=np.array(losses), **params)
#     dist.destroy_process_group()
#
#
# if __name__ == "__main__":
#     main()
