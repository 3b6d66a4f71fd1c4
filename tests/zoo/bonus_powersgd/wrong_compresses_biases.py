"""Sees a vector as a matrix of one column, and sends more than it has.

loses: powersgd_vectors, powersgd_bytes, powersgd_errors
because: what must not be compressed has no exact mean, an error, and more bytes than it has
    numbers.
says: powersgd_vectors is not compressed, expected None
says: powersgd_bytes What else travels?
"""


# %% replaces="task5_class"
class PowerSGD:
    def __init__(self, parameters, rank, seed=0):
        self.parameters = list(parameters)
        self.shapes, self.qs = {}, {}
        for i, p in enumerate(self.parameters):
            shape = (
                matrix_shape(tuple(p.shape), rank) or (p.numel(), 1)
                if p.dim() == 1
                else matrix_shape(tuple(p.shape), rank)
            )
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
            self.qs[i] = torch.where(q.norm(dim=0) > 0, q, self.qs[i])

    def q_of(self, i):
        return self.qs.get(i)
