"""Keeps the new Q also where it has become zero.

loses: powersgd_revive
says: powersgd_revive Keep the old Q's column then
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
        for p, mean in zip(rest, packed_mean([p.grad for p in rest])):
            p.grad = mean
        matrices = [self.parameters[i].grad.reshape(nm) for i, nm in self.shapes.items()]
        ps, qs = power_step(matrices, list(self.qs.values()))
        for i, p, q in zip(self.shapes, ps, qs):
            self.parameters[i].grad = (p @ q.T).view_as(self.parameters[i])
            self.qs[i] = q

    def q_of(self, i):
        return self.qs.get(i)
