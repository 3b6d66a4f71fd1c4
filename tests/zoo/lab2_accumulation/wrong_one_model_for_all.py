"""Trains the same model on for every k, so only the first curve begins at the beginning.

loses: accum_convergence
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
    model = make_model()
    own = global_batch_size // world_size
    curves = {}
    for k in accumulation_steps:
        curves[k] = []
        for step in range(num_steps):
            a = step * global_batch_size + rank * own
            pieces = list(zip(x[a : a + own].chunk(k), y[a : a + own].chunk(k), strict=True))
            curves[k].append(train_step(model, pieces))
    return curves
