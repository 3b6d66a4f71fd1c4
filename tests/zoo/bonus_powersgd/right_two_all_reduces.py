"""What is not compressed travels with the Ps; errors are kept inside one class.

loses: nothing
class: example
"""


# %% replaces="task2_packed_mean"
def packed_mean(tensors):
    if len(tensors) == 0:
        return []
    flat = torch.nn.utils.parameters_to_vector(tensors) / dist.get_world_size()
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    means, at = [], 0
    for tensor in tensors:
        means.append(flat[at : at + tensor.numel()].reshape(tensor.shape))
        at += tensor.numel()
    return means


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
        low = list(self.shapes)
        rest = [i for i in range(len(self.parameters)) if i not in self.shapes]
        matrices = [self.parameters[i].grad.reshape(self.shapes[i]) for i in low]
        products = [matrix @ self.qs[i] for i, matrix in zip(low, matrices)]
        means = packed_mean([self.parameters[i].grad for i in rest] + products)
        for i, mean in zip(rest, means):
            self.parameters[i].grad.copy_(mean)
        ps = [orthonormalise(mean) for mean in means[len(rest) :]]
        qs = packed_mean([matrix.T @ p for matrix, p in zip(matrices, ps)])
        for i, p, q in zip(low, ps, qs):
            self.parameters[i].grad.copy_((p @ q.T).view_as(self.parameters[i]))
            dead = q.norm(dim=0) == 0
            q[:, dead] = self.qs[i][:, dead]
            self.qs[i] = q

    def q_of(self, i):
        return self.qs.get(i)
