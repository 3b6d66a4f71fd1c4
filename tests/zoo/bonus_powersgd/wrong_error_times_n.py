"""Multiplies the error by the number of ranks, because the mean will divide it.

loses: powersgd_telescope, powersgd_errors, powersgd_steps, powersgd_converges
because: the sum of what is applied and late is wrong, and so is every step after the first.
says: powersgd_errors times the error: it needs no factor
"""


# %% replaces="task6_feedback"
class FeedbackPowerSGD(PowerSGD):
    def __init__(self, parameters, rank, seed=0):
        super().__init__(parameters, rank, seed)
        self.errors = {i: torch.zeros_like(self.parameters[i].data) for i in self.shapes}

    def reduce_gradients(self):
        own = {i: self.parameters[i].grad + e for i, e in self.errors.items()}
        for i, total in own.items():
            self.parameters[i].grad = total
        super().reduce_gradients()
        for i, total in own.items():
            self.errors[i] = dist.get_world_size() * (total - self.parameters[i].grad)

    def error_of(self, i):
        return self.errors.get(i, torch.zeros_like(self.parameters[i].data))
