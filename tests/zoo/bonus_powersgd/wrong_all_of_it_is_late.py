"""Puts every gradient into the errors and applies none, so that nothing is ever lost.

loses: powersgd_telescope, powersgd_errors, powersgd_steps,
    powersgd_converges, powersgd_resume
because: nothing is ever applied, so everything that feedback is for is missing.
says: powersgd_converges with error feedback the loss is
says: powersgd_steps It is zero: nothing was applied
"""


# %% replaces="task6_feedback"
class FeedbackPowerSGD(PowerSGD):
    def __init__(self, parameters, rank, seed=0):
        super().__init__(parameters, rank, seed)
        self.errors = {i: torch.zeros_like(self.parameters[i].data) for i in self.shapes}

    def reduce_gradients(self):
        own = {i: self.parameters[i].grad.clone() for i in self.errors}
        super().reduce_gradients()
        for i, gradient in own.items():
            self.errors[i] += gradient
            self.parameters[i].grad.zero_()

    def error_of(self, i):
        return self.errors.get(i, torch.zeros_like(self.parameters[i].data))
