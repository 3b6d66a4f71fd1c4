"""What is not compressed is summed, not averaged.

loses: powersgd_vectors, powersgd_steps
because: powersgd_steps holds all of it against one process, so what is wrong in one step is wrong
    there.
"""


# %% replaces="task5_class"
class PowerSGD:
    def __init__(self, parameters, rank, seed=0):
        self.parameters = list(parameters)
        self.shapes, self.qs = {}, {}
        for i, p in enumerate(self.parameters):
            shape = matrix_shape(tuple(p.shape), rank)
            if shape is not None:
                generator = torch.Generator().manual_seed(seed + i)
                q = torch.randn(shape[1], rank, generator=generator, dtype=p.dtype)
                self.shapes[i], self.qs[i] = shape, q.to(p.device)

    def reduce_gradients(self):
        rest = [p for i, p in enumerate(self.parameters) if i not in self.shapes]
        if rest:
            flat = torch.cat([p.grad.reshape(-1) for p in rest])
            dist.all_reduce(flat)
            for p, total in zip(rest, flat.split([p.numel() for p in rest])):
                p.grad = total.view_as(p)
        matrices = [self.parameters[i].grad.reshape(nm) for i, nm in self.shapes.items()]
        ps, qs = power_step(matrices, list(self.qs.values()))
        for i, p, q in zip(self.shapes, ps, qs):
            self.parameters[i].grad = (p @ q.T).view_as(self.parameters[i])
            self.qs[i] = torch.where(q.norm(dim=0) > 0, q, self.qs[i])

    def q_of(self, i):
        return self.qs.get(i)
