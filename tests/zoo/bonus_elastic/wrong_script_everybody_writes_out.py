"""All ranks write --out, at the same time.

loses: elastic_script
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
#     ### BEGIN SOLUTION
#     if device.type == "cuda":
#         torch.cuda.set_device(device)
#     dist.init_process_group(choose_backend())
#     rank, world_size = dist.get_rank(), dist.get_world_size()
#     sampler = ElasticSampler(len(x), args.batch_size, seed=args.seed)
#     losses = []
#
#     # Resume.
#     found = load_together(args.checkpoints)
#     if found is not None:
#         _, state = found
#         model.load_state_dict(state["model"])
#         optimizer.load_state_dict(state["optimizer"])
#         sampler.load_state_dict(state["sampler"])
#         losses = state["losses"]
#
#     # Train and save.
#     with Preemption() as preemption:
#         stop = False
#         while len(losses) < args.steps and not stop:
#             own, size = sampler.next_batch(rank, world_size)
#             optimizer.zero_grad()
#             loss = 0.0
#             if own:
#                 mean = nn.functional.mse_loss(model(x[own]), y[own])
#                 mean.backward()
#                 loss = mean.item()
#             losses.append(combine(model.parameters(), loss, len(own), size))
#             optimizer.step()
#
#             stop = preemption.requested()
#             done = len(losses)
#             if stop or done % args.every == 0 or done == args.steps:
#                 state = {
#                     "model": model.state_dict(),
#                     "optimizer": optimizer.state_dict(),
#                     "sampler": sampler.state_dict(),
#                     "losses": losses,
#                 }
#                 save_together(args.checkpoints, done, state)
#
#     # Write.
#     if len(losses) == args.steps:
#         params = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
#         np.savez(args.out, losses=np.array(losses), **params)
#     dist.barrier()  # nobody leaves before the file is there
#     dist.destroy_process_group()
#     ### END SOLUTION
#
#
# if __name__ == "__main__":
#     main()
