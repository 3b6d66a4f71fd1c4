"""JupyterHub for this course: one machine whose users are the students. README.md says how.

It holds no secret, and changes nothing in the course's folder.
"""

import os
from pathlib import Path
from typing import Any

c = get_config()  # type: ignore[name-defined]  # noqa: F821

# What `autograder release` wrote, with its own environment: everybody reads it, nobody writes.
STUDENTS = Path(os.environ.get("MINIDIST_STUDENTS", "/srv/minidist-students"))
# The checkout with solutions, keys and grades: for the instructors alone.
COURSE = Path(os.environ.get("MINIDIST_COURSE", "/srv/minidist"))
INSTRUCTORS = set(os.environ.get("MINIDIST_INSTRUCTORS", "instructor").split())
# Seconds until an idle kernel's ranks are ended.
IDLE_S = int(os.environ.get("MINIDIST_HUB_IDLE_S", "1800"))

# A student's name on this machine is the student's id in the class list. Students are separate
# users of the machine, so that none reads the files of another: both are JupyterHub's defaults
# (PAM, and LocalProcessSpawner, which needs a hub that runs as root).
c.Authenticator.allow_existing_users = True
c.Authenticator.allowed_users = set(INSTRUCTORS)  # and `useradd` with the group below for students
c.PAMAuthenticator.allowed_groups = {"minidist"}

c.Spawner.default_url = "/lab"
c.Spawner.http_timeout = 120
c.Spawner.start_timeout = 120
# LocalProcessSpawner tells the limit and does not enforce it; SystemdSpawner, DockerSpawner and
# KubeSpawner do. Measured: see README.md.
c.Spawner.mem_limit = "3G"
c.Spawner.environment = {
    # nbgrader_config.py of the release: Validate then judges as the grader does.
    "JUPYTER_CONFIG_PATH": str(STUDENTS),
    "AUTOGRADER_COURSE": str(STUDENTS),
    "OMP_NUM_THREADS": "1",  # the ranks of all students share the cores
}
c.Spawner.args = [
    # A kernel with ranks holds most of a student's memory, also while nobody looks at it.
    f"--MappingKernelManager.cull_idle_timeout={IDLE_S}",
    f"--MappingKernelManager.cull_interval={max(1, min(120, IDLE_S // 4))}",
    "--MappingKernelManager.cull_connected=True",  # a browser that was left open is no work
    f"--ServerApp.shutdown_no_activity_timeout={max(3600, 4 * IDLE_S)}",
]
c.JupyterHub.concurrent_spawn_limit = 10  # the first minute of a lesson


def choose_installation(spawner: Any) -> None:
    """Gives instructors the course's folder, with formgrader, and everybody else the release."""
    home = COURSE if spawner.user.name in INSTRUCTORS else STUDENTS
    own = home / ".venv" / "bin" / "jupyterhub-singleuser"
    if own.is_file():
        spawner.cmd = [str(own)]
    if home == COURSE:
        spawner.notebook_dir = str(COURSE)
        names = ("JUPYTER_CONFIG_PATH", "AUTOGRADER_COURSE")
        spawner.environment = dict.fromkeys(names, str(COURSE))


c.Spawner.pre_spawn_hook = choose_installation
