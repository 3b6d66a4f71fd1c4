"""All random states in one file, with the optimizer; the model is built under a forked generator.

loses: nothing
class: example
"""


# %% replaces="mend_8"
def save_checkpoint(folder, model, optimizer, step):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    if dist.get_rank() == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": states,
            "step": step,
        }
        torch.save(state, folder / "checkpoint.pt")
    dist.barrier()


def load_checkpoint(folder, model, optimizer):
    state = torch.load(folder / "checkpoint.pt", map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"][dist.get_rank()])
    return state["step"]


# %% replaces="mend_11"
def build_model(make_model, seed, rank):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model()
    torch.manual_seed(1_000_003 * (rank + 1) + seed)
    return model
