"""Adds the error to the gradient, and once more to the sum.

loses: powersgd_steps, powersgd_converges
because: no single step shows it: it takes several, or a training.
"""


# %% replaces="task6_feedback"
class FeedbackPowerSGD(PowerSGD):
    def __init__(self, parameters, rank, seed=0):
        super().__init__(parameters, rank, seed)
        self.errors = {i: torch.zeros_like(self.parameters[i].data) for i in self.shapes}

    def reduce_gradients(self):
        own = {i: self.parameters[i].grad + e for i, e in self.errors.items()}
        for i, total in own.items():
            self.parameters[i].grad = total + self.errors[i]
        super().reduce_gradients()
        for i in own:
            self.errors[i] = own[i] - self.parameters[i].grad

    def error_of(self, i):
        return self.errors.get(i, torch.zeros_like(self.parameters[i].data))
