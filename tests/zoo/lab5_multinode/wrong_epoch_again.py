"""Resumes at the beginning of the epoch.

loses: resume_sampler
"""


# %% replaces="task4_resume"
def collect_state(training: Training) -> dict:
    """Everything that decides the next step, on all ranks; every rank has to call it."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    mine = {
        "torch": torch.get_rng_state(),
        "numpy": (name, keys.tolist(), position, has_gauss, gauss),
        "python": random.getstate(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "epoch": training.sampler.epoch,
        "position": training.sampler.position,
        "step": training.step,
        "random": everyone,
    }


def restore_state(training: Training, state: dict) -> None:
    """Puts into `training` what `collect_state` returned on rank 0."""
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["scheduler"])
    training.sampler.epoch = state["epoch"]
    training.step = state["step"]

    mine = state["random"][dist.get_rank()]
    torch.set_rng_state(mine["torch"])
    np.random.set_state(mine["numpy"])
    random.setstate(mine["python"])
    if mine["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])
