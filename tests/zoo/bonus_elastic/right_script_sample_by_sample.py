"""The script goes sample by sample, and keeps all state in one dict.

loses: nothing
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
#     dist.init_process_group(choose_backend())
#     rank, world_size = dist.get_rank(), dist.get_world_size()
#     sampler = ElasticSampler(num_samples=len(y), global_batch=args.batch_size, seed=args.seed)
#     state = {"done": 0, "losses": []}
#     _, state = load_together(args.checkpoints) or (0, state)
#     if state["done"]:
#         model.load_state_dict(state["model"])
#         optimizer.load_state_dict(state["optimizer"])
#         sampler.load_state_dict(state["sampler"])
#     preemption = Preemption()
#     preemption.__enter__()
#     told = False
#     while state["done"] < args.steps and not told:
#         own, size = sampler.next_batch(rank, world_size)
#         # The sum over this rank's samples by hand; a rank without samples has a sum of zero.
#         total = torch.zeros((), dtype=torch.float64, device=device)
#         for index in own:
#             total = total + (model(x[index]) - y[index]).pow(2).mean()
#         loss = total / len(own) if own else None
#         optimizer.zero_grad(set_to_none=False)
#         if loss is not None:
#             loss.backward()
#         value = 0.0 if loss is None else loss.detach().item()
#         state["losses"] += [combine(model.parameters(), value, len(own), size)]
#         optimizer.step()
#         state["done"] += 1
#         told = preemption.requested()
#         due = state["done"] % args.every == 0 or state["done"] == args.steps
#         if told or due:
#             state["model"] = model.state_dict()
#             state["optimizer"] = optimizer.state_dict()
#             state["sampler"] = sampler.state_dict()
#             save_together(args.checkpoints, state["done"], state)
#     preemption.__exit__(None, None, None)
#     if state["done"] == args.steps and not rank:
#         arrays = [p.detach().cpu().numpy() for p in model.parameters()]
#         np.savez(args.out, p0=arrays[0], p1=arrays[1], p2=arrays[2], p3=arrays[3],
#                  losses=state["losses"])
#     dist.destroy_process_group()
#
#
# if __name__ == "__main__":
#     main()
