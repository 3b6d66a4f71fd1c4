"""The checkpoint has weights and random states, but no optimizer.

loses: debug_resume_optimizer
class: example
says: debug_resume_optimizer The optimizer began anew
"""


# %% replaces="mend_8"
def save_checkpoint(folder, model, optimizer, step):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    if dist.get_rank() == 0:
        state = {
            "model": model.state_dict(),
            "random": states,
            "step": step,
        }
        torch.save(state, folder / "checkpoint.pt")
    dist.barrier()


def load_checkpoint(folder, model, optimizer):
    state = torch.load(folder / "checkpoint.pt", map_location="cpu")
    model.load_state_dict(state["model"])
    torch.set_rng_state(state["random"][dist.get_rank()])
    return state["step"]
