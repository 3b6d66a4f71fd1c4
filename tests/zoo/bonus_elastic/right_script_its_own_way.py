"""The script in other words: losses in a tensor, one loop over what has a state, no barrier.

loses: nothing
class: example
"""

# %% replaces="task6_script" tags=["active-ipynb"]
# %%rank 0
# %%writefile train_elastic.py
# """Trains a small regression network on as many ranks as there are, from the newest checkpoint."""
#
# import argparse
#
# import numpy as np
# import torch
# import torch.distributed as dist
# from elastic_parts import ElasticSampler, Preemption, combine, load_together, save_together
# from torch import nn
#
# from minidist.device import choose_backend, choose_device
#
#
# def make_training(data, lr, device):
#     """Model and optimizer as they are before the first step, in float64."""
#     hidden, inputs = data["p0"].shape
#     model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()
#     with torch.no_grad():
#         for i, param in enumerate(model.parameters()):
#             param.copy_(torch.from_numpy(data[f"p{i}"]))
#     model = model.to(device)
#     return model, torch.optim.AdamW(model.parameters(), lr=lr)
#
#
# def main():
#     parser = argparse.ArgumentParser()
#     parser.add_argument("--data", required=True)  # .npz with x, y and p0 … p3
#     parser.add_argument("--out", required=True)  # .npz for the trained p0 … p3 and all losses
#     parser.add_argument("--checkpoints", required=True)  # a folder that all ranks see
#     parser.add_argument("--steps", type=int, required=True)  # in all, earlier runs included
#     parser.add_argument("--every", type=int, required=True)  # steps between checkpoints
#     parser.add_argument("--batch-size", type=int, required=True)  # of all ranks together
#     parser.add_argument("--lr", type=float, required=True)
#     parser.add_argument("--seed", type=int, required=True)  # of the sampler
#     args = parser.parse_args()
#     data = np.load(args.data)
#     device = choose_device()
#     x, y = (torch.from_numpy(data[name]).double().to(device) for name in "xy")
#     model, optimizer = make_training(data, args.lr, device)
#     dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
#     me, all_ranks = dist.get_rank(), dist.get_world_size()
#     dealer = ElasticSampler(data["x"].shape[0], args.batch_size, args.seed)
#     parts = {"model": model, "optimizer": optimizer, "dealer": dealer}
#     first, losses = 0, torch.zeros(args.steps, dtype=torch.float64)
#     resumed = load_together(args.checkpoints)
#     if resumed:
#         first, saved = resumed
#         losses[:first] = saved["losses"][:first]
#         for name, part in parts.items():
#             part.load_state_dict(saved[name])
#
#     def save(step):
#         state = {name: part.state_dict() for name, part in parts.items()}
#         save_together(args.checkpoints, step, state | {"losses": losses}, keep=5)
#
#     with Preemption() as preemption:
#         for step in range(first, args.steps):
#             rows, size = dealer.next_batch(me, all_ranks)
#             for parameter in model.parameters():
#                 parameter.grad = None
#             error = (model(x[rows]) - y[rows]).square().sum() / max(1, len(rows))
#             if len(rows) > 0:
#                 error.backward()
#             losses[step] = combine(list(model.parameters()), float(error), len(rows), size)
#             optimizer.step()
#             if preemption.requested():
#                 save(step + 1)
#                 return
#             if not (step + 1) % args.every or step + 1 == args.steps:
#                 save(step + 1)
#     if me == 0:
#         trained = {f"p{i}": p.numpy(force=True) for i, p in enumerate(model.parameters())}
#         np.savez(args.out, losses=losses.numpy(), **trained)
#
#
# if __name__ == "__main__":
#     main()
