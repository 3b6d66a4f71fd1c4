"""Other tools: numpy's blocks, a BatchSampler, gathered objects, flattening late, dist.reduce.

loses: nothing
"""


# %% replaces="task3_sampler"
class ShardSampler(Sampler[int]):
    """Yields the indices of one rank's share of a dataset."""

    def __init__(
        self,
        num_samples: int,
        rank: int,
        world_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: str = "pad",
    ):
        super().__init__()
        self._n, self._rank, self._world = num_samples, rank, world_size
        self._shuffle, self._seed, self._tail = shuffle, seed, tail
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        order = np.arange(self._n)
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._n)
        if self._tail == "pad" and self._n:
            order = np.resize(order, math.ceil(self._n / self._world) * self._world)
        elif self._tail == "drop":
            order = order[: self._n - self._n % self._world]
        self._mine = np.array_split(order, self._world)[self._rank].tolist()

    def __len__(self) -> int:
        return len(self._mine)

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._mine))


# %% replaces="task4_train"
from torch.utils.data import BatchSampler


def train(
    ddp_model,
    dataset,
    sampler,
    loss_fn,
    *,
    num_epochs,
    batch_size,
    lr,
    device,
    log: Callable[[str], None] | None = None,
) -> list[float]:
    """Keeps sums and counts of all epochs and exchanges them once, at the end."""
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
    optimizer = torch.optim.SGD(
        [p for p in ddp_model.parameters() if p.requires_grad], lr=lr, momentum=0.0, foreach=False
    )
    loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, batch_size, drop_last=False))
    sums = torch.zeros(num_epochs, 2, dtype=torch.float64, device=device)
    ddp_model.train()
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            inputs, targets = (part.to(device, non_blocking=True) for part in batch)
            loss = loss_fn(ddp_model(inputs), targets)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            size = inputs.shape[0]
            sums[epoch] += torch.stack([loss.detach().double() * size, torch.tensor(size).to(loss)])
        if log:
            log(f"epoch {epoch} done")
    everyone = [torch.zeros_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, sums)
    total, count = torch.stack(everyone).sum(0).unbind(1)
    return (total / count).tolist()


# %% replaces="task6_in_sync"
from itertools import combinations


def gradients_in_sync(model: nn.Module, tol: float = 1e-6) -> bool:
    """Every rank gets every rank's gradients and compares all pairs, so all come to the same."""
    mine = {
        name: None if p.grad is None else p.grad.detach().cpu().to(torch.float64).numpy().copy()
        for name, p in model.named_parameters()
    }
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)

    def close(a, b) -> bool:
        if a is None or b is None:
            return a is b
        return a.shape == b.shape and bool(np.all(np.abs(a - b) <= tol))

    return all(
        close(one[name], other[name]) for one, other in combinations(everyone, 2) for name in one
    )


# %% replaces="task7_ddp"
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class DDP(nn.Module):
    """Data parallelism: a bucket is flattened only when it is launched."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0):
        """Wraps `module`; gradients travel in buckets of at most `bucket_cap_mb` MB."""
        super().__init__()
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb: expected more than 0, got {bucket_cap_mb}")
        self.module = module
        self._share_state()
        names = [n for n, p in module.named_parameters() if p.requires_grad]
        self._params = dict(module.named_parameters())
        self._plan = self._make_plan(names[::-1], bucket_cap_mb * 1e6)
        self._bucket = {n: k for k, names in enumerate(self._plan) for n in names}
        for name in names:
            self._params[name].register_post_accumulate_grad_hook(partial(self._ready, name))
        self._arm()

    def _share_state(self) -> None:
        by_dtype: dict = {}
        for t in chain(self.module.parameters(), self.module.buffers()):
            by_dtype.setdefault((t.dtype, t.device), []).append(t.detach())
        for tensors in by_dtype.values():
            flat = torch.cat([t.reshape(-1) for t in tensors])
            dist.broadcast(flat, 0)
            for t, new in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                t.copy_(new.view(t.shape))

    def _make_plan(self, names, cap):
        plan, used, last = [], math.inf, None
        for name in names:
            p = self._params[name]
            size = p.numel() * p.element_size()
            if used + size > cap or p.dtype is not last:
                plan.append([])
                used = 0
            plan[-1].append(name)
            used, last = used + size, p.dtype
        return plan

    def _arm(self) -> None:
        self._gone: dict[int, tuple] = {}
        self._seen: set[str] = set()

    def forward(self, *args, **kwargs):
        """Runs the module."""
        return self.module(*args, **kwargs)

    def _ready(self, name: str, _param: torch.Tensor) -> None:
        self._seen.add(name)
        for k in range(len(self._gone), len(self._plan)):
            if not self._seen.issuperset(self._plan[k]):
                return
            self._launch(k)

    @torch.no_grad()
    def _launch(self, k: int) -> None:
        tensors = [
            self._params[n].grad.contiguous()
            if n in self._seen
            else torch.zeros(self._params[n].shape).to(self._params[n])
            for n in self._plan[k]
        ]
        flat = _flatten_dense_tensors(tensors).clone()
        self._gone[k] = flat, tensors, dist.all_reduce(flat, async_op=True)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Returns when every p.grad is the mean of this step's gradients over all ranks."""
        for k in range(len(self._gone), len(self._plan)):
            self._launch(k)
        world = dist.get_world_size()
        for k, (flat, tensors, work) in self._gone.items():
            work.wait()
            for name, mean in zip(
                self._plan[k], _unflatten_dense_tensors(flat / world, tensors), strict=True
            ):
                p = self._params[name]
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                p.grad.copy_(mean)
        self._arm()


# %% replaces="task5_script"
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
#
#     local_rank = int(os.environ["LOCAL_RANK"])
#     enough = torch.cuda.is_available() and torch.cuda.device_count() >= int(
#         os.environ["LOCAL_WORLD_SIZE"]
#     )
#     device = torch.device("cuda", local_rank) if enough else torch.device("cpu")
#     if enough:
#         torch.cuda.set_device(device)
#     dist.init_process_group(backend="nccl" if enough else "gloo")
#     data = np.load(args.data)
#     dataset = TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))
#     hidden, inputs = data["p0"].shape
#     model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
#     with torch.no_grad():
#         for i, param in enumerate(model.parameters()):
#             param.copy_(torch.from_numpy(data[f"p{i}"]))
#     model = DistributedDataParallel(
#         model.to(device), device_ids=[local_rank] if enough else None
#     )
#     sampler = DistributedSampler(dataset)
#     loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
#     optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
#     loss_fn = nn.MSELoss()
#     losses = []
#     for epoch in range(args.epochs):
#         sampler.set_epoch(epoch)
#         totals = torch.zeros(2, dtype=torch.float64, device=device)
#         for x, y in loader:
#             x, y = x.to(device), y.to(device)
#             optimizer.zero_grad()
#             loss = loss_fn(model(x), y)
#             loss.backward()
#             optimizer.step()
#             totals[0] += loss.item() * len(x)
#             totals[1] += len(x)
#         dist.reduce(totals, dst=0)
#         losses.append(float(totals[0] / totals[1]))  # only rank 0's is used
#     if dist.get_rank() == 0:
#         params = {
#             f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.module.parameters())
#         }
#         with open(args.out, "wb") as file:
#             np.savez(file, losses=np.asarray(losses, dtype=np.float64), **params)
#     dist.barrier()
#     dist.destroy_process_group()
#
#
# if __name__ == "__main__":
#     main()
