"""One flat buffer for all P, one for all Q, one for all errors; all-reduces in the background.

The number of ranks is the notebook's WORLD_SIZE.

loses: nothing
"""


# %% replaces="task5_class"
class PowerSGD:
    def __init__(self, parameters, rank, seed=0):
        self.parameters, self.rank = list(parameters), rank
        pairs = [(i, matrix_shape(tuple(p.shape), rank)) for i, p in enumerate(self.parameters)]
        self.low = {i: nm for i, nm in pairs if nm}
        like = self.parameters[0].data
        generator = torch.Generator().manual_seed(seed)
        count = rank * sum(m for _, m in self.low.values())
        self.q_flat = torch.randn(count, generator=generator, dtype=like.dtype).to(like.device)
        self.p_flat = like.new_zeros(rank * sum(n for n, _ in self.low.values()))

    def cut(self, flat, side):
        sizes = [nm[side] for nm in self.low.values()]
        parts = flat.split([self.rank * size for size in sizes])
        return {i: part.view(size, self.rank) for i, part, size in zip(self.low, parts, sizes)}

    def q_of(self, i):
        return self.cut(self.q_flat, 1).get(i)

    def reduce_gradients(self):
        n = WORLD_SIZE
        rest = [p for i, p in enumerate(self.parameters) if i not in self.low]
        waiting = None
        if rest:
            together = torch.cat([p.grad.reshape(-1) for p in rest])
            waiting = dist.all_reduce(together, async_op=True)
        if self.low:
            matrices = {i: self.parameters[i].grad.reshape(nm) for i, nm in self.low.items()}
            ps, qs = self.cut(self.p_flat, 0), self.cut(self.q_flat, 1)
            for i, matrix in matrices.items():
                torch.mm(matrix, qs[i], out=ps[i])
            dist.all_reduce(self.p_flat, async_op=True).wait()
            new_flat = torch.empty_like(self.q_flat)
            new_qs = self.cut(new_flat, 1)
            for i, matrix in matrices.items():
                ps[i].copy_(orthonormalise(ps[i]))
                new_qs[i].copy_(matrix.T @ ps[i])
            dist.all_reduce(new_flat, async_op=True).wait()
            new_flat /= n
            for i in self.low:
                parameter = self.parameters[i]
                parameter.grad = torch.mm(ps[i], new_qs[i].T).reshape(parameter.shape)
                alive = new_qs[i].abs().amax(dim=0) > 0
                qs[i][:, alive] = new_qs[i][:, alive]
        if rest:
            waiting.wait()
            together /= n
            for p, mean in zip(rest, together.split([p.numel() for p in rest])):
                p.grad = mean.reshape(p.shape)


# %% replaces="task6_feedback"
class FeedbackPowerSGD(PowerSGD):
    def __init__(self, parameters, rank, seed=0):
        super().__init__(parameters, rank, seed)
        self.flat = self.parameters[0].data.new_zeros(sum(n * m for n, m in self.low.values()))

    def errors(self):
        parts = self.flat.split([n * m for n, m in self.low.values()])
        return {i: part.view(self.parameters[i].shape) for i, part in zip(self.low, parts)}

    def reduce_gradients(self):
        errors = self.errors()
        for i, error in errors.items():
            error += self.parameters[i].grad
            self.parameters[i].grad = error.clone()
        super().reduce_gradients()
        for i, error in errors.items():
            error -= self.parameters[i].grad

    def error_of(self, i):
        return self.errors().get(i, torch.zeros_like(self.parameters[i].data))


# %% replaces="task7_state"
def save_state(reducer):
    return {"q": reducer.q_flat, "errors": reducer.flat, "rank": reducer.rank}


def load_state(reducer, state):
    assert state["rank"] == reducer.rank
    reducer.q_flat.copy_(state["q"])
    reducer.flat.copy_(state["errors"])
