"""A real Slurm for a test: munged, slurmctld and two slurmd under one host, in a folder of its own.

Nothing of the machine's own Slurm, if there is one, is touched: every daemon gets its own
configuration, ports, sockets and folders, and is ended by its pid. Needs root, as slurmd does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from autograder.batch.slurm.backend import SlurmJobs
from minidist.processes.ports import free_port

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
NODES = ("n1", "n2")
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=300
MessageTimeout=50
InactiveLimit=0
KillWait=5
MinJobAge=3600
GresTypes=gpu
NodeName=DEFAULT CPUs=4 RealMemory=64000 Gres=gpu:fake:2
NodeName=n1 NodeHostName={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=n2 NodeHostName={host} NodeAddr=127.0.0.1 Port={ports[2]}
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=main Nodes=n1,n2 Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=n1,n2 PriorityTier=9 MaxTime=INFINITE State=UP
"""
# Slurm hands out what is a device; nobody opens these.
GPUS = "NodeName={nodes} Name=gpu Type=fake File={folder}/gpu[0-1]\n"
NULL = os.makedev(1, 3)


def why_not() -> str:
    """Why no Slurm can be started here; empty if one can."""
    if missing := [name for name in NEEDED if find(name) is None]:
        return f"Slurm is not installed: no {', '.join(missing)}"
    return "" if os.getuid() == 0 else "Slurm's daemons need root"


class SlurmCluster:
    """The daemons, and what a test does to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir()
        (folder / "state").mkdir()
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        text = CONFIG.format(folder=folder, host=host, ports=[free_port() for _ in range(3)])
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(GPUS.format(nodes=",".join(NODES), folder=folder))
        for number in range(2):
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, NULL)
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Starts all daemons and waits until both nodes take jobs."""
        files = {"key-file": "key", "pid-file": "pid", "socket": "socket", "log-file": "log"}
        options = [f"--{name}={self.folder}/munge.{end}" for name, end in files.items()]
        seed = f"--seed-file={self.folder}/munge.seed"
        self.spawn("munged", "munged", "--foreground", "--force", seed, *options)
        wait_until((self.folder / "munge.socket").exists, 20, "munged has no socket")
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.wait_idle()

    def start_controller(self, *options: str) -> None:
        self.spawn("slurmctld", "slurmctld", "-D", *options)

    def start_node(self, node: str) -> None:
        self.spawn(node, "slurmd", "-D", "-N", node)

    def wait_idle(self) -> None:
        """Waits until both nodes are free."""

        def states() -> list[str]:
            return self.say("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split()

        wait_until(lambda: states() == ["idle"] * 2, 60, lambda: f"nodes are not idle: {states()}")

    def say(self, *command: str, check: bool = True) -> str:
        """Runs one of Slurm's commands; what it said."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, command: str, *options: str) -> str:
        """Submits a shell command that says nothing; the job's id."""
        said = self.say("sbatch", *options, "--parsable", "-o", "/dev/null", "--wrap", command)
        return said.strip()

    def kill_node(self, node: str) -> None:
        """What a power cut does: slurmd and everything that it had started are gone at once."""
        # All are stopped before any is killed: a step that outlives its script reports its end.
        stopped: set[psutil.Process] = set()
        while found := self._parts_of(node) - stopped:
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.suspend()
            stopped |= found
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.daemons.pop(node).wait(timeout=20)

    def _parts_of(self, node: str) -> set[psutil.Process]:
        """A node's slurmd, its steps, and what they run."""
        daemon = psutil.Process(self.daemons[node].pid)
        parts = {daemon, *daemon.children(recursive=True)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if self._is_step(process, node) or self._runs_for(process, node):
                    parts.add(process)
        return parts

    def _is_step(self, process: psutil.Process, node: str) -> bool:
        """Whether it is a slurmstepd of this node: only the log that it writes to says so."""
        log = f"{self.folder}/slurmd-{node}.log"
        return process.name() == "slurmstepd" and log in (f.path for f in process.open_files())

    def _runs_for(self, process: psutil.Process, node: str) -> bool:
        told = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        wanted = f"SLURM_CONF={self.folder}/slurm.conf", f"SLURMD_NODENAME={node}"
        return all(word.encode() in told for word in wanted)

    def stop(self, name: str) -> None:
        """Ends a daemon as its service would."""
        daemon = self.daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(timeout=20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(timeout=20)

    def close(self) -> None:
        """Cancels what runs and ends all daemons."""
        if "slurmctld" in self.daemons:
            self.say("scancel", "--user=root", check=False)
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not self.say("squeue", "-h", check=False), 20, "")
        for name in reversed(list(self.daemons)):
            self.stop(name)
        self._kill_steps()

    def _kill_steps(self) -> None:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                told = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                ours = f"SLURM_CONF={self.folder}/slurm.conf".encode() in told
                if ours and process.name() in ("slurmstepd", "srun"):
                    process.send_signal(signal.SIGKILL)

    def logs(self) -> str:
        """The ends of the daemons' logs, for a test that failed."""
        texts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            texts.append(f"-- {path.name}\n" + "\n".join(lines))
        return "\n".join(texts)

    def spawn(self, name: str, program: str, *arguments: str) -> None:
        """Starts a daemon that `close` ends."""
        path = find(program)
        assert path is not None, f"{program} is not installed"
        log = (self.folder / f"{name}.said").open("ab")
        with log:
            self.daemons[name] = subprocess.Popen(
                [path, *arguments],
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def heed_ctrl_c() -> None:
    """For `preexec_fn`: what a shell starts in the background ignores SIGINT, and all below it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(
    condition: Callable[[], bool], within_s: float, message: str | Callable[[], str]
) -> None:
    """Fails with the message if the condition is not true in time."""
    ends_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > ends_at:
            raise AssertionError(message if isinstance(message, str) else message())
        time.sleep(0.2)


def job_states(jobs: SlurmJobs, ids: Mapping[str, str]) -> dict[str, str]:
    """What a grader is told of jobs, under the names that they have here; of those it knows."""
    seen = jobs.look(ids.values())
    assert seen is not None
    return {name: seen[job].state for name, job in ids.items() if job in seen}


def find(name: str) -> str | None:
    """Where a program is, daemons included."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")


@contextlib.contextmanager
def running(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, started; gone at the end."""
    try:
        cluster.start()
        yield cluster
    except BaseException:
        print(cluster.logs(), file=sys.stderr)
        raise
    finally:
        cluster.close()
