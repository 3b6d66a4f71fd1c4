"""Every rank writes the checkpoint.

loses: elastic_writer
"""


# %% replaces="task3_saving"
def save_together(folder: str | Path, step: int, state: dict, keep: int = 3) -> None:
    """Rank 0 writes the checkpoint of a step; all wait for it."""
    if True:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{step:08d}.pt"
        temporary = path.with_suffix(f".{dist.get_rank()}.tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # the data first, then the name
        os.replace(temporary, path)
        for old in sorted(folder.glob("step-*.pt"))[:-keep]:
            old.unlink()
    dist.barrier()


def load_together(folder: str | Path) -> tuple[int, dict] | None:
    """(step, state) of the newest checkpoint that all ranks can read; None without one."""
    files = {int(path.stem.removeprefix("step-")): path for path in Path(folder).glob("step-*.pt")}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, set(files))
    for step in sorted(set.intersection(*everyone), reverse=True):
        try:
            state = torch.load(files[step], map_location="cpu", weights_only=True)
        except Exception:  # whatever is wrong with the file
            state = None
        whole = torch.tensor(float(state is not None), device=choose_device())
        dist.all_reduce(whole, op=dist.ReduceOp.MIN)
        if whole.item():
            return step, state
    return None
