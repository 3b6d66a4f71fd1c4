"""torch's own sampler deals out the epoch, and its own functions flatten gradients.

loses: nothing
"""


# %% replaces="task1_share"
def share_of_batch(size, world_size, rank):
    parts = [len(part) for part in torch.tensor_split(torch.arange(size), world_size)]
    return slice(sum(parts[:rank]), sum(parts[: rank + 1]))


# %% replaces="task1_combine"
def combine(parameters, loss, num_own, num_all):
    from torch.nn.utils import parameters_to_vector

    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = parameters_to_vector(p.grad for p in parameters) * (num_own / num_all)
    dist.all_reduce(flat)
    at = 0
    for parameter in parameters:
        parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
        at += parameter.numel()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, loss * num_own)
    return sum(everyone) / num_all


# %% replaces="task2_sampler"
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler


class ElasticSampler:
    def __init__(self, num_samples, global_batch, seed=0, share=share_of_batch):
        self.whole = DistributedSampler(range(num_samples), num_replicas=1, rank=0, seed=seed)
        self.batches = BatchSampler(self.whole, global_batch, drop_last=False)
        self.share, self.epoch, self.done = share, 0, 0

    def next_batch(self, rank, world_size):
        self.whole.set_epoch(self.epoch)
        batch = list(self.batches)[self.done]
        self.done += 1
        if self.done == len(self.batches):
            self.epoch, self.done = self.epoch + 1, 0
        return batch[self.share(len(batch), world_size, rank)], len(batch)

    def state_dict(self):
        return {"epoch": self.epoch, "done": torch.tensor(self.done)}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], int(state["done"])


# %% replaces="task4_reshard"
def reshard(states, numel, num_ranks):
    def cut(name):
        joined = torch.cat([state[name] for state in states]).narrow(0, 0, numel)
        padded = nn.functional.pad(joined, (0, -numel % num_ranks))
        return [part.contiguous().clone() for part in padded.chunk(num_ranks)]

    vectors = {
        name: cut(name) for name, value in states[0].items() if getattr(value, "ndim", 0) == 1
    }
    rest = {name: value for name, value in states[0].items() if name not in vectors}
    return [
        copy.deepcopy(rest) | {name: parts[r] for name, parts in vectors.items()}
        for r in range(num_ranks)
    ]
