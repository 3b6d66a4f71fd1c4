"""Collecting sets the gradients to None, which is wrong in the middle of an accumulation.

loses: resume_training
"""


# %% replaces="task4_resume"
def collect_state(training: Training) -> dict:
    name, numbers, position, has_gauss, gauss = np.random.get_state()
    mine = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (name, numbers.tolist(), position, has_gauss, gauss),
        "python": random.getstate(),
    }
    training.optimizer.zero_grad()
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
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["scheduler"])
    training.sampler.epoch = state["epoch"]
    training.sampler.position = state["position"]
    training.step = state["step"]
    mine = state["random"][dist.get_rank()]
    torch.set_rng_state(mine["torch"])
    if mine["cuda"] is not None:
        torch.cuda.set_rng_state(mine["cuda"])
    name, numbers, *rest = mine["numpy"]
    np.random.set_state((name, np.array(numbers, dtype=np.uint32), *rest))
    random.setstate(mine["python"])
