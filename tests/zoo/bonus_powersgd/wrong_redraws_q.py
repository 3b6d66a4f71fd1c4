"""Draws a new Q for every step.

loses: powersgd_warm, powersgd_steps, powersgd_resume
class: example
because: no step begins where the one before ended, with or without a checkpoint. The check of
    five steps holds all of it against one process.
says: powersgd_resume Does it draw anything anew?
says: powersgd_warm every step starts with the Q of the step before
"""


# %% replaces="task5_class"
class PowerSGD:
    def __init__(self, parameters, rank, seed=0):
        self.parameters, self.generator = list(parameters), torch.Generator().manual_seed(seed)
        self.shapes, self.qs = {}, {}
        for i, p in enumerate(self.parameters):
            shape = matrix_shape(tuple(p.shape), rank)
            if shape is not None:
                q = torch.randn(shape[1], rank, generator=self.generator, dtype=p.dtype)
                self.shapes[i], self.qs[i] = shape, q.to(p.device)

    def reduce_gradients(self):
        rest = [p for i, p in enumerate(self.parameters) if i not in self.shapes]
        for p, mean in zip(rest, packed_mean([p.grad for p in rest])):
            p.grad = mean
        matrices = [self.parameters[i].grad.reshape(nm) for i, nm in self.shapes.items()]
        ps, qs = power_step(matrices, list(self.qs.values()))
        for i, p, q in zip(self.shapes, ps, qs):
            self.parameters[i].grad = (p @ q.T).view_as(self.parameters[i])
            self.qs[i] = torch.randn(q.shape, generator=self.generator, dtype=q.dtype).to(q.device)

    def q_of(self, i):
        return self.qs.get(i)
