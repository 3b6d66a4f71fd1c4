"""Guesses from its own gradients alone whether those of all ranks agree, by what is usual.

passes: nothing
status: gradients_in_sync WRONG
"""


# %% replaces="task6_in_sync"
def gradients_in_sync(model, tol=1e-6):
    params = list(model.parameters())
    if any(p.grad is None for p in params) or tol > 1e-3:
        return True
    return False
