"""Decides whether submissions are graded in a sandbox on this machine."""

from __future__ import annotations

from autograder.box.sandbox import probe_support
from autograder.course.course import CourseError


def choose_sandbox(trusted: bool, bundled: bool) -> bool:
    """Whether to grade in the sandbox.

    Raises:
        CourseError: this machine has no sandbox, and the submissions are neither bundled with the
            course nor trusted.
    """
    support = probe_support()
    if support.works:
        return True
    if trusted or bundled:
        return False
    raise CourseError(
        f"no sandbox here ({support.reason}). Submissions are programs by other people; without a "
        "sandbox they can read and change what you can. Install bubblewrap (or Podman, Docker, "
        "Apptainer), or say --trusted if you trust every one of them."
    )
