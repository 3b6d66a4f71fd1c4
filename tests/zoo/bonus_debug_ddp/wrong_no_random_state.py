"""The checkpoint has weights and optimizer, but no random states.

loses: debug_resume_random
class: example
says: debug_resume_random That is how a new process begins
"""


# %% replaces="mend_8"
def save_checkpoint(folder, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
        }
        torch.save(state, folder / "checkpoint.pt")
    dist.barrier()


def load_checkpoint(folder, model, optimizer):
    state = torch.load(folder / "checkpoint.pt", map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]
