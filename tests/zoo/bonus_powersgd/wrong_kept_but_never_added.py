"""Keeps the error of every step and does not add it.

loses: powersgd_telescope, powersgd_steps, powersgd_converges
says: powersgd_steps no error is added
because: the sum of what is applied and late is wrong, and so is every step after the first.
"""


# %% replaces="task6_feedback"
class FeedbackPowerSGD(PowerSGD):
    def __init__(self, parameters, rank, seed=0):
        super().__init__(parameters, rank, seed)
        self.errors = {i: torch.zeros_like(self.parameters[i].data) for i in self.shapes}

    def reduce_gradients(self):
        own = {i: self.parameters[i].grad.clone() for i in self.errors}
        super().reduce_gradients()
        for i in own:
            self.errors[i] = own[i] - self.parameters[i].grad

    def error_of(self, i):
        return self.errors.get(i, torch.zeros_like(self.parameters[i].data))
