"""Keeps an error for what is averaged exactly, too.

loses: powersgd_errors
"""


# %% replaces="task6_feedback"
class FeedbackPowerSGD(PowerSGD):
    def __init__(self, parameters, rank, seed=0):
        super().__init__(parameters, rank, seed)
        self.errors = {i: torch.zeros_like(p.data) for i, p in enumerate(self.parameters)}

    def reduce_gradients(self):
        own = {i: self.parameters[i].grad + e for i, e in self.errors.items()}
        for i, total in own.items():
            self.parameters[i].grad = total
        super().reduce_gradients()
        for i, total in own.items():
            self.errors[i] = total - self.parameters[i].grad

    def error_of(self, i):
        return self.errors.get(i, torch.zeros_like(self.parameters[i].data))
