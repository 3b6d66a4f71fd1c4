"""A JupyterLab of its own, for tests in a browser."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minidist.processes.ports import free_port

OWN = (
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR",
)


@contextmanager
def jupyter_lab(folder: Path, settings: Path, *options: str, **variables: str) -> Iterator[str]:
    """JupyterLab in `folder`, without the user's settings; yields its address.

    Args:
        settings: a folder for settings, workspaces and data of this server.
        options: more of the command line.
        variables: of the environment.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"),
        *("--ServerApp.token=", "--ServerApp.port_retries=0", "--expose-app-in-browser"),
        *options,
    ]
    server = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {name: str(settings / name) for name in OWN} | variables,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 200
        while True:
            try:
                urllib.request.urlopen(f"{address}/api", timeout=5)
                break
            except OSError:
                assert time.monotonic() < end, "JupyterLab did not start"
                assert server.poll() is None, "JupyterLab ended"
                time.sleep(0.2)
        yield address
    finally:
        server.send_signal(signal.SIGTERM)  # it ends its kernels
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(5)
