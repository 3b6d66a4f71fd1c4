"""Shares by rounding, gradients one by one in float64, an order that is hashed and sorted.

loses: nothing
class: example
"""


# %% replaces="task1_share"
def share_of_batch(size: int, world_size: int, rank: int) -> slice:
    return slice(size * rank // world_size, size * (rank + 1) // world_size)


# %% replaces="task1_combine"
def combine(parameters, loss, num_own, num_all):
    total = torch.tensor(loss * num_own, dtype=torch.float64, device=choose_device())
    dist.all_reduce(total)
    for parameter in parameters:
        doubled = torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
        if num_own:
            doubled += parameter.grad * num_own
        dist.all_reduce(doubled)
        parameter.grad = (doubled / num_all).to(parameter.dtype)
    return (total / num_all).item()


# %% replaces="task2_sampler"
class ElasticSampler:
    def __init__(self, num_samples, global_batch, seed=0, share=share_of_batch):
        self.size, self.batch, self.seed, self.share = num_samples, global_batch, seed, share
        self.step = 0

    def next_batch(self, rank, world_size):
        import hashlib

        per_epoch = -(-self.size // self.batch)
        epoch, number = divmod(self.step, per_epoch)
        self.step += 1

        def key(index):
            return hashlib.sha256(f"{self.seed}/{epoch}/{index}".encode()).digest()

        order = sorted(range(self.size), key=key)
        batch = order[number * self.batch : (number + 1) * self.batch]
        part = self.share(len(batch), world_size, rank)
        return batch[part], len(batch)

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]
