"""torch's own hook behind the contract, with a bucket of ours around the gradients.

loses: nothing
class: example
"""

# %% replaces="task5_class"
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks


class Bucket:
    """What torch's hook asks a bucket for."""

    def __init__(self, parameters):
        self.flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        parts = self.flat.split([p.numel() for p in parameters])
        # It sees a tensor as [shape[0], -1], so a scalar has to become a vector.
        self.views = [part.view(p.shape or (1,)) for p, part in zip(parameters, parts)]

    def buffer(self):
        return self.flat

    def gradients(self):
        return self.views

    def index(self):
        return 0

    def is_last(self):
        return True


class PowerSGD:
    feedback = False

    def __init__(self, parameters, rank, seed=0):
        self.parameters, self.rank = list(parameters), rank
        self.state = hooks.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=1,
            use_error_feedback=self.feedback,
            orthogonalization_epsilon=1e-30,
            random_seed=seed,
        )
        self.state.iter = 2
        pairs = [(i, matrix_shape(tuple(p.shape), rank)) for i, p in enumerate(self.parameters)]
        # The hook goes through its tensors shape by shape.
        shapes = list(dict.fromkeys(nm for _, nm in pairs if nm))
        self.low = {i: nm for shape in shapes for i, nm in pairs if nm == shape}
        like = self.parameters[0].data
        generator = torch.Generator().manual_seed(seed)
        count = rank * sum(m for _, m in self.low.values())
        q = torch.randn(count, generator=generator, dtype=like.dtype).to(like.device)
        self.state.q_memory_dict[0] = q
        self.state.p_memory_dict[0] = like.new_zeros(rank * sum(n for n, _ in self.low.values()))

    def q_of(self, i):
        sizes = [m * self.rank for _, m in self.low.values()]
        parts = dict(zip(self.low, self.state.q_memory_dict[0].split(sizes)))
        return parts[i].view(-1, self.rank) if i in parts else None

    def reduce_gradients(self):
        old = {i: self.q_of(i).clone() for i in self.low}
        bucket = Bucket(self.parameters)
        future = hooks.powerSGD_hook(self.state, bucket)
        future.wait()
        for p, view in zip(self.parameters, bucket.views):
            p.grad = view.reshape(p.shape)
        for i, q in old.items():  # torch's Q, once zero, would stay so
            new = self.q_of(i)
            new.copy_(torch.where(new.norm(dim=0) > 0, new, q))


# %% replaces="task6_feedback"
class FeedbackPowerSGD(PowerSGD):
    feedback = True

    def error_of(self, i):
        p = self.parameters[i]
        if i not in self.low or 0 not in self.state.error_dict:
            return torch.zeros_like(p.data)
        sizes = [p.numel() for p in self.parameters]
        return self.state.error_dict[0].split(sizes)[i].view(p.shape)


# %% replaces="task7_state"
def save_state(reducer):
    return {"q": reducer.state.q_memory_dict[0], "error": reducer.state.error_dict[0]}


def load_state(reducer, state):
    reducer.state.q_memory_dict[0] = state["q"]
    reducer.state.error_dict[0] = state["error"]
