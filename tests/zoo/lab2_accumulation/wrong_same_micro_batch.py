"""Keeps the micro-batch and lets the global batch grow with k: the unfair comparison.

loses: accum_convergence
class: example
"""


# %% replaces="task7_convergence"
def compare_convergence(
    make_model,
    train_step,
    x,
    y,
    *,
    global_batch_size,
    num_steps,
    accumulation_steps,
    rank,
    world_size,
):
    largest = max(accumulation_steps)
    micro = global_batch_size // world_size // largest
    curves = {}
    for k in accumulation_steps:
        model = make_model()
        curves[k] = []
        for step in range(num_steps):
            pieces = []
            for i in range(k):
                a = ((step * k + i) * world_size + rank) * micro
                pieces.append((x[a : a + micro], y[a : a + micro]))
            curves[k].append(train_step(model, pieces))
    return curves
