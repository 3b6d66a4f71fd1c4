"""What is not sent is thrown away.

loses: powersgd_telescope, powersgd_errors, powersgd_steps, powersgd_converges
class: example
because: the sum of what is applied and late is wrong, and so is every step after the first.
says: powersgd_converges What one step does not send has to come in later ones
"""


# %% replaces="task6_feedback"
class FeedbackPowerSGD(PowerSGD):
    def __init__(self, parameters, rank, seed=0):
        super().__init__(parameters, rank, seed)
        self.errors = {i: torch.zeros_like(self.parameters[i].data) for i in self.shapes}

    def reduce_gradients(self):
        super().reduce_gradients()

    def error_of(self, i):
        return self.errors.get(i, torch.zeros_like(self.parameters[i].data))
