"""Comes back at once: what was there before is there after it, and there is room for everything.

loses: pipe_gradients, pipe_orders, pipe_tokens, pipe_scale, pipe_uneven, pipe_accumulate,
    pipe_loss, pipe_messages, pipe_limit, pipe_time
because: without a message there are no gradients, no loss and no training.
says: pipe_loss The last rank has no right loss either.
says: pipe_gradients the stage has no gradients but zeros
says: pipe_orders the stage has no gradients but zeros
says: pipe_tokens tokens in, an embedding in the first stage
says: pipe_scale the gradients are 0 times those of the batch's mean loss
says: pipe_uneven They are zero
says: pipe_accumulate the call has added nothing
says: pipe_messages this rank sent 0 bytes to rank
"""


# %% replaces="task4_pipeline"
def run_pipeline(stage, schedule, micro_batches, targets, loss_fn, buffer):
    return torch.zeros(())
