"""Makes as many steps as there are data for, not num_steps.

loses: accum_convergence
says: accum_convergence make num_steps steps
"""


# %% replaces="task7_convergence"
def compare_convergence(
    make_model: Callable[[], nn.Module],
    train_step: Callable[[nn.Module, list[Batch]], float],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    global_batch_size: int,
    num_steps: int,
    accumulation_steps: Sequence[int],
    rank: int,
    world_size: int,
) -> dict[int, list[float]]:
    mine = global_batch_size // world_size
    curves = {}
    for k in accumulation_steps:
        model = make_model()
        losses = []
        for s in range(len(x) // global_batch_size):
            begin = s * global_batch_size + rank * mine
            xs = x[begin : begin + mine].chunk(k)
            ys = y[begin : begin + mine].chunk(k)
            losses.append(train_step(model, list(zip(xs, ys, strict=True))))
        curves[k] = losses
    return curves
