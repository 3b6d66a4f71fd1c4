"""Subtracts what P makes of this rank's own matrix. The updates are right all the same.

loses: powersgd_errors
class: example
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
            mean = self.parameters[i].grad.reshape(self.shapes[i])
            rank = self.qs[i].shape[1]
            p = torch.linalg.svd(mean, full_matrices=False)[0][:, :rank]
            sent = p @ (p.T @ total.reshape(self.shapes[i]))
            self.errors[i] = total - sent.view_as(total)

    def error_of(self, i):
        return self.errors.get(i, torch.zeros_like(self.parameters[i].data))
