"""Multiplies the share with the busy time, and takes a backward for two forwards.

loses: pipe_bubble
"""


# %% replaces="task3_bubble"
def bubble_fraction(num_stages, num_micro_batches):
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def idle_seconds(num_stages, num_micro_batches, forward_s, backward_s):
    return bubble_fraction(num_stages, num_micro_batches) * num_micro_batches * forward_s * 3


def micro_batches_for(num_stages, most_bubble):
    return max(1, math.ceil((num_stages - 1) * (1 - most_bubble) / most_bubble))
