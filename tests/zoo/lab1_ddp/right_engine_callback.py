"""Waits in a callback at the end of backward; the sampler is a subclass of torch's.

loses: nothing
"""


# %% replaces="task3_sampler"
class ShardSampler(torch.utils.data.distributed.DistributedSampler):
    def __init__(self, num_samples, rank, world_size, *, shuffle=True, seed=0, tail="pad"):
        super().__init__(
            range(num_samples),
            world_size,
            rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=(tail == "drop"),
        )
        self.tail, self.n = tail, num_samples

    def __len__(self):
        if self.tail == "drop":
            return self.n // self.num_replicas
        if self.tail == "uneven":
            return len(range(self.rank, self.n, self.num_replicas))
        return super().__len__()

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.seed + self.epoch)
        order = (
            torch.randperm(self.n, generator=g).tolist() if self.shuffle else list(range(self.n))
        )
        if self.tail != "uneven":
            order = (order * (self.num_replicas + 1))[: len(self) * self.num_replicas]
        return iter(order[self.rank :: self.num_replicas])


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
#     kinds = {"data": str, "out": str, "epochs": int, "batch-size": int, "lr": float}
#     for name, kind in kinds.items():
#         parser.add_argument("--" + name, type=kind, required=True)
#     args = parser.parse_args()
#     gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
#     dist.init_process_group("nccl" if gpu else "gloo")
#     rank = dist.get_rank()
#     device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
#     data = np.load(args.data)
#     dataset = TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))
#     hidden, inputs = data["p0"].shape
#     model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
#     with torch.no_grad():
#         for i, param in enumerate(model.parameters()):
#             param.copy_(torch.from_numpy(data[f"p{i}"]))
#     model = DistributedDataParallel(model.to(device), device_ids=[device.index] if gpu else None)
#     sampler = DistributedSampler(dataset)
#     loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
#     optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
#     losses = []
#     for epoch in range(args.epochs):
#         sampler.set_epoch(epoch)
#         loss_sum, num = 0.0, 0
#         for x, y in loader:
#             x, y = x.to(device), y.to(device)
#             optimizer.zero_grad()
#             loss = nn.functional.mse_loss(model(x), y)
#             loss.backward()
#             optimizer.step()
#             loss_sum += loss.item() * len(x)
#             num += len(x)
#         both = [None] * dist.get_world_size()
#         dist.all_gather_object(both, (loss_sum, num))
#         losses.append(sum(b[0] for b in both) / sum(b[1] for b in both))
#     params = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.module.parameters())}
#     dist.barrier()
#     if not rank:
#         np.savez(args.out, losses=np.array(losses), **params)
#     dist.destroy_process_group()
#
#
# if __name__ == "__main__":
#     main()
#


# %% replaces="task7_ddp"
class DDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.buckets, self.launched, group = [], 0, []
        for param in reversed([p for p in module.parameters() if p.requires_grad]):
            if group and (
                sum(p.nbytes for p in group) + param.nbytes > bucket_cap_mb * 10**6
                or param.dtype != group[0].dtype
            ):
                self.add_bucket(group)
                group = []
            group.append(param)
        if group:
            self.add_bucket(group)

    def add_bucket(self, params):
        flat = torch.zeros(
            sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device
        )
        pieces = flat.split([p.numel() for p in params])
        slots = {p: piece.view_as(p) for p, piece in zip(params, pieces, strict=True)}
        bucket = Bucket(flat, slots, waiting=set(params))
        self.buckets.append(bucket)
        for param in params:
            param.register_post_accumulate_grad_hook(partial(self.arrived, bucket))

    def arrived(self, bucket, param):
        bucket.slots[param].copy_(param.grad)
        bucket.waiting.remove(param)
        if not getattr(self, "queued", False):
            self.queued = True
            self.finished = False
            torch.autograd.Variable._execution_engine.queue_callback(self.at_end)
        self.launch()

    def launch(self):
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if bucket.waiting:
                return
            pass
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
            self.launched += 1

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def at_end(self):
        self.queued = False
        self.finish()
        self.finished = True

    def finish_gradient_synchronization(self):
        if not getattr(self, "finished", False):
            self.finish()
        self.finished = False

    @torch.no_grad()
    def finish(self):
        for bucket in self.buckets:
            for param in bucket.waiting:
                bucket.slots[param].zero_()
            bucket.waiting.clear()
        self.launch()
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat.div_(dist.get_world_size())
            pass
            for param, slot in bucket.slots.items():
                param.grad = slot.clone()
            bucket.waiting.update(bucket.slots)
        self.launched = 0
