"""Joins two micro-batches each: as much memory as two, and never more.

loses: accum_memory
"""


# %% replaces="task1_accumulate"
def accumulate_gradients(
    model: nn.Module, micro_batches: Sequence[Batch], loss_fn: LossFn
) -> float:
    total = sum(len(x) for x, _ in micro_batches)
    mean = 0.0
    pairs = [micro_batches[i : i + 2] for i in range(0, len(micro_batches), 2)]
    for pair in pairs:
        x, y = (torch.cat(parts) for parts in zip(*pair))
        loss = loss_fn(model(x), y) * (len(x) / total)
        loss.backward()
        mean += loss.item()
    return mean
