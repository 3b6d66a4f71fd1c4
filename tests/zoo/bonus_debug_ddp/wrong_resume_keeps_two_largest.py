"""Keeps the checkpoints of the two largest steps: after going back, the last one is removed.

loses: debug_resume_optimizer
says: debug_resume_optimizer the last one counts
"""


# %% replaces="mend_8"
def save_checkpoint(folder, model, optimizer, step):
    rank, own = dist.get_rank(), folder / f"{step:08d}"
    own.mkdir(exist_ok=True)
    torch.save(torch.get_rng_state(), own / f"random_{rank}.pt")
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, own / "checkpoint.pt")
    dist.barrier()
    if rank == 0:
        for old in sorted(folder.iterdir())[:-2]:
            shutil.rmtree(old)
    dist.barrier()


def load_checkpoint(folder, model, optimizer):
    own = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)  # the last one
    state = torch.load(own / "checkpoint.pt", map_location=DEVICE)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(torch.load(own / f"random_{dist.get_rank()}.pt"))
    return state["step"]
