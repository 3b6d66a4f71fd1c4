"""Takes the number from the ratio, which asks for too many micro-batches.

loses: pipe_choice
"""


# %% replaces="task3_bubble"
def bubble_fraction(num_stages, num_micro_batches):
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def idle_seconds(num_stages, num_micro_batches, forward_s, backward_s):
    return (num_stages - 1) * (forward_s + backward_s)


def micro_batches_for(num_stages, most_bubble):
    return max(1, math.ceil((num_stages - 1) / most_bubble))
