"""Slurm's accounting for a test: slurmdbd and the MariaDB that it keeps its records in.

As on a real cluster, a job then needs an account, a QOS has to be allowed, and `sacct` knows jobs
that the controller has forgotten.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
from pathlib import Path

from slurm_cluster import SlurmCluster, find, wait_until

from minidist.processes.ports import free_port

NEEDED = ("slurmdbd", "sacctmgr", "sacct", "mariadbd", "mariadb-install-db", "my_print_defaults")
CLUSTER = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,qos
"""
DAEMON = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={store}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""
ALLOWED = """
CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{password}';
GRANT ALL ON slurm.* TO slurm@'127.0.0.1';
"""


def why_no_accounting() -> str:
    """Why it cannot be started here; empty if it can."""
    missing = [name for name in NEEDED if find(name) is None]
    return f"Slurm's accounting is not installed: no {', '.join(missing)}" if missing else ""


class AccountedCluster(SlurmCluster):
    """A cluster with the account `course`, which root may use with the QOS `grading`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._port, self._store = free_port(), free_port()
        password = secrets.token_hex(16)
        self._write("allowed.sql", ALLOWED.format(password=password))
        self._write(
            "slurmdbd.conf",
            DAEMON.format(folder=folder, port=self._port, store=self._store, password=password),
        )
        with (folder / "slurm.conf").open("a") as file:
            file.write(CLUSTER.format(folder=folder, port=self._port))

    def start_controller(self, *options: str) -> None:
        if "slurmdbd" not in self.daemons:
            self._start_accounting()
        super().start_controller(*options)

    def _start_accounting(self) -> None:
        where = ["--no-defaults", "--user=root", f"--datadir={self.folder}/store"]
        installer = find("mariadb-install-db")
        assert installer is not None
        done = subprocess.run(
            [installer, *where, "--auth-root-authentication-method=normal", "--skip-test-db"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.spawn(
            "mariadbd",
            "mariadbd",
            *where,
            "--bind-address=127.0.0.1",
            f"--port={self._store}",
            f"--socket={self.folder}/store.socket",
            f"--pid-file={self.folder}/store.pid",
            f"--init-file={self.folder}/allowed.sql",
        )
        wait_until(lambda: _listens(self._store), 60, "mariadbd does not listen")
        self.spawn("slurmdbd", "slurmdbd", "-D")
        wait_until(lambda: _listens(self._port), 60, "slurmdbd does not listen")
        for what in (
            ["cluster", "tests"],
            ["qos", "grading"],
            ["account", "course"],
            ["user", "root", "account=course", "qos=normal,grading"],
        ):
            self.say("sacctmgr", "--immediate", "add", *what)

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(text)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
