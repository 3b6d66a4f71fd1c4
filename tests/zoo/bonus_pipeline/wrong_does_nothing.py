"""Comes back at once: what was there before is there after it, and there is room for everything.

loses: pipe_gradients, pipe_orders, pipe_tokens, pipe_scale, pipe_uneven, pipe_accumulate,
    pipe_loss, pipe_messages, pipe_limit, pipe_time
because: without a message there are no gradients, no loss and no training.
says: pipe_loss The last rank has no right loss either.
"""


# %% replaces="task4_pipeline"
def run_pipeline(stage, schedule, micro_batches, targets, loss_fn, buffer):
    return torch.zeros(())
