"""Calls the power iteration once per parameter.

loses: powersgd_calls
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
        for i, p in enumerate(self.parameters):
            if i not in self.shapes:
                (p.grad,) = packed_mean([p.grad])
                continue
            (left,), (q,) = power_step([p.grad.reshape(self.shapes[i])], [self.qs[i]])
            p.grad = (left @ q.T).view_as(p)
            self.qs[i] = torch.where(q.norm(dim=0) > 0, q, self.qs[i])

    def q_of(self, i):
        return self.qs.get(i)
