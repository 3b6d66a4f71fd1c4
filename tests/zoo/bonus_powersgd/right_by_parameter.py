"""One record per parameter, Q drawn when it is asked for, feedback around, not below.

loses: nothing
"""


# %% replaces="task5_class"
class Record:
    def __init__(self, number, parameter, rank, seed):
        self.parameter, self.rank, self.error = parameter, rank, None
        self.shape = matrix_shape(tuple(parameter.shape), rank)
        self.seed, self.q = 1_000_003 * seed + 7 * number, None

    def start(self):
        if self.q is None and self.shape:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                q = torch.randn(self.shape[1], self.rank, dtype=self.parameter.dtype)
            self.q = q.to(self.parameter.device)
        return self.q


class PowerSGD:
    def __init__(self, parameters, rank, seed=0):
        self.records = [Record(i, p, rank, seed) for i, p in enumerate(parameters)]

    def q_of(self, i):
        return self.records[i].start()

    def reduce_gradients(self):
        low = [record for record in self.records if record.shape]
        rest = [record.parameter for record in self.records if not record.shape]
        matrices = [record.parameter.grad.reshape(record.shape) for record in low]
        ps, qs = power_step(matrices, [record.start() for record in low])
        for record, p, q in zip(low, ps, qs):
            record.parameter.grad.copy_((p @ q.T).reshape(record.parameter.shape))
            record.q = torch.where(q.abs().sum(dim=0) == 0, record.q, q)
        for parameter, mean in zip(rest, packed_mean([p.grad for p in rest])):
            parameter.grad.copy_(mean)


# %% replaces="task6_feedback"
class FeedbackPowerSGD:
    def __init__(self, parameters, rank, seed=0):
        self.inner = PowerSGD(parameters, rank, seed)
        self.q_of = self.inner.q_of

    def reduce_gradients(self):
        low = [record for record in self.inner.records if record.shape]
        for record in low:
            if record.error is not None:
                record.parameter.grad.add_(record.error)
            record.error = record.parameter.grad.clone()
        self.inner.reduce_gradients()
        for record in low:
            record.error -= record.parameter.grad

    def error_of(self, i):
        record = self.inner.records[i]
        return torch.zeros_like(record.parameter) if record.error is None else record.error


# %% replaces="task7_state"
def save_state(reducer):
    return {"records": [[record.q, record.error] for record in reducer.inner.records]}


def load_state(reducer, state):
    for record, (q, error) in zip(reducer.inner.records, state["records"]):
        record.q, record.error = q, error
