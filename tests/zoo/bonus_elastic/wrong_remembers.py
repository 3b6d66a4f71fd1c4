"""What one `with` was told is still there in the next.

loses: elastic_stop
"""


# %% replaces="task5_preemption"
class Preemption:
    """Notices SIGTERM, and lets all ranks know at the same step."""

    told = False

    def __enter__(self) -> "Preemption":
        self.before = signal.signal(signal.SIGTERM, self.note)
        return self

    def note(self, number: int, frame: object) -> None:
        """The handler: nothing but a note, for it may run between any two lines."""
        Preemption.told = True

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    def requested(self) -> bool:
        """Has any rank been told to stop? The same answer on all ranks."""
        flag = torch.tensor(float(self.told), device=choose_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
