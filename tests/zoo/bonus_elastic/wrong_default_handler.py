"""Afterwards SIGTERM has Python's default handler.

loses: elastic_handler
"""


# %% replaces="task5_preemption"
class Preemption:
    """Notices SIGTERM, and lets all ranks know at the same step."""

    def __enter__(self) -> "Preemption":
        self.told = False
        self.before = signal.signal(signal.SIGTERM, self.note)
        return self

    def note(self, number: int, frame: object) -> None:
        """The handler: nothing but a note, for it may run between any two lines."""
        self.told = True

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def requested(self) -> bool:
        """Has any rank been told to stop? The same answer on all ranks."""
        flag = torch.tensor(float(self.told), device=choose_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
