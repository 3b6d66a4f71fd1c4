"""Counts a tensor as often as it is saved, and the parameters that are saved with them.

loses: amp_memory
"""


# %% replaces="task4_memory"
def memory_report(model, optimizer, compute_loss):
    saved = []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor

    optimizer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute_loss()
    loss.backward()
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values()]
    return {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "optimizer": sum(v.nbytes for v in states if torch.is_tensor(v)),
        "saved": sum(saved),
    }
