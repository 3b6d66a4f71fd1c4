"""A real JupyterHub with its proxy: two students and an instructor, over HTTP and websockets."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from pathlib import Path

import nbformat
import psutil
import pytest
from course import LAB, ROOT, TestCourse

from autograder.proof.zoo import write_class
from minidist.processes.ports import free_port

pytest.importorskip("jupyterhub", reason="jupyterhub is not installed")
websocket = pytest.importorskip("websocket", reason="websocket-client is not installed")
PROXY = shutil.which("configurable-http-proxy")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(PROXY is None, reason="JupyterHub's proxy is not installed"),
]
IDLE_S = 60
LIMIT_BYTES = 3 << 30  # as in the ready configuration
# A step of data parallelism, as lab 1 has it.
CELL = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(512, 512))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(64, 512)).sum().backward()
optimizer.step()
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, (dist.get_rank(), os.getpid()))
print([rank for rank, _ in everyone], "in", len({pid for _, pid in everyone}), "processes")
"""
STEP_S = 400.0

# What is different in a test: nobody has a password, and the students are no users of the machine.
CONFIG = """
load_subconfig({ready!r})
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.spawner_class = "simple"
c.Authenticator.allow_all = True
c.SimpleLocalProcessSpawner.home_dir_template = {homes!r} + "/{{username}}"
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_port = {hub_port}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api_port}"
c.JupyterHub.db_url = "sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/secret"
c.ConfigurableHTTPProxy.pid_file = "{folder}/proxy.pid"
c.Spawner.args.append("--allow-root")
c.JupyterHub.services = [{{"name": "test", "api_token": {token!r}}}]
c.JupyterHub.load_roles = [
    {{"name": "test", "services": ["test"],
      "scopes": ["admin:users", "admin:servers", "tokens", "access:servers"]}}
]
"""
STUDENTS = """
import os
c.Exchange.root = {exchange!r}
# Simple spawner: everybody is the same user of the machine, so nbgrader cannot tell them apart.
if os.environ.get("JUPYTERHUB_USER") not in (None, "teach"):
    c.CourseDirectory.student_id = os.environ["JUPYTERHUB_USER"]
"""


class Hub:
    """The hub, as the test asks it and as its users do."""

    def __init__(self, folder: Path, course: TestCourse, students: Path) -> None:
        self.folder, self.port, self.token = folder, free_port(), secrets.token_hex(16)
        self.hub_port, self.log = free_port(), folder / "hub.log"
        (folder / "hub_config.py").write_text(
            CONFIG.format(
                ready=str(ROOT / "docs" / "hub" / "jupyterhub_config.py"),
                homes=str(folder / "homes"),
                port=self.port,
                hub_port=self.hub_port,
                api_port=free_port(),
                folder=folder,
                token=self.token,
            )
        )
        self.env = os.environ | {
            "MINIDIST_STUDENTS": str(students),
            "MINIDIST_COURSE": str(course.root),
            "MINIDIST_INSTRUCTORS": "teach",
            "MINIDIST_HUB_IDLE_S": str(IDLE_S),
            "NODE_PATH": "/usr/share/nodejs",  # of Debian's proxy, whichever node comes first
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self.tokens: dict[str, str] = {}

    @contextlib.contextmanager
    def running(self):
        with self.log.open("w") as log:
            hub = subprocess.Popen(
                [sys.executable, "-m", "jupyterhub", "-f", str(self.folder / "hub_config.py")],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.wait(lambda: hub.poll() or self.ask("GET", "/hub/api/", code=None) == 200)
            assert hub.poll() is None, self.said()
            yield
        finally:
            hub.send_signal(signal.SIGTERM)  # it ends the servers and the proxy
            with contextlib.suppress(subprocess.TimeoutExpired):
                hub.wait(60)
            for process in [*self.processes(), *([] if hub.poll() is not None else [hub])]:
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(hub.pid, signal.SIGKILL)
            hub.wait(10)

    def processes(self, user: str = "") -> list[psutil.Process]:
        """Processes of the servers of all users, or of one."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                variables = process.environ()
                ours = f":{self.hub_port}/" in variables.get("JUPYTERHUB_API_URL", "")
                if ours and user in ("", variables.get("JUPYTERHUB_USER")):
                    found.append(process)
        return found

    def memory(self, user: str) -> tuple[int, int]:
        """Bytes of a user's server, kernels and ranks: their own, and of mapped files."""
        own = files = 0
        for process in self.processes(user):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                    name, _, size = line.partition(":")
                    if name in ("Pss_Anon", "Pss_Shmem"):
                        own += int(size.split()[0]) << 10
                    elif name == "Pss_File":
                        files += int(size.split()[0]) << 10
        return own, files

    def ask(self, method, path, *, user="", code=200, body=None, form=None):
        """JSON from the hub, or a server with its user's token; the code if `code` is None."""
        data = json.dumps(body).encode() if body is not None else None
        if form is not None:
            data = urllib.parse.urlencode(form).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{urllib.parse.quote(path, safe='/?=&')}",
            method=method,
            data=data,
            headers={"Authorization": f"token {self.tokens.get(user, self.token)}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=STEP_S) as answer:
                got, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            got, text = error.code, error.read()
        except OSError:
            if code is None:
                return 0
            raise
        if code is None:
            return got
        expected = code if isinstance(code, tuple) else (code,)
        assert got in expected, f"{method} {path}: {got} {text[-500:]!r}\n{self.said()}"
        return json.loads(text) if text.strip() else None

    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")[-6000:]

    def wait(self, condition, seconds=STEP_S):
        ends_at = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends_at, self.said()
            time.sleep(0.3)

    def begin(self, user):
        """Makes the user, starts the user's server and a token that may do what the user may."""
        self.ask("POST", f"/hub/api/users/{user}", code=(201, 409))  # it knows instructors already
        made = self.ask("POST", f"/hub/api/users/{user}/tokens", code=201, body={"note": "test"})
        self.tokens[user] = made["token"]
        self.ask("POST", f"/hub/api/users/{user}/server", code=(201, 202))
        self.wait(lambda: self.ask("GET", f"/hub/api/users/{user}")["servers"].get("", {})["ready"])

    def assignment(self, user, action, **form):
        """nbgrader's buttons in JupyterLab."""
        form = form or {"course_id": "minidist", "assignment_id": LAB}
        found = self.ask("POST", f"/user/{user}/assignments/{action}", user=user, form=form)
        assert found["success"] is True, found
        return found["value"]

    def run(self, user, code):
        """Runs a cell in a new kernel on two ranks; everything that it printed."""
        kernel = self.ask(
            "POST", f"/user/{user}/api/kernels", user=user, code=201, body={"name": "torchrun-2"}
        )["id"]
        socket = websocket.create_connection(
            f"ws://127.0.0.1:{self.port}/user/{user}/api/kernels/{kernel}/channels",
            header=[f"Authorization: token {self.tokens[user]}"],
            timeout=STEP_S,
        )
        try:
            number = uuid.uuid4().hex
            header = {"msg_id": number, "msg_type": "execute_request", "version": "5.3"}
            header |= {"username": user, "session": uuid.uuid4().hex, "date": ""}
            content = {"code": code, "silent": False, "store_history": False}
            content |= {"user_expressions": {}, "allow_stdin": False, "stop_on_error": True}
            about = {"parent_header": {}, "metadata": {}, "channel": "shell"}
            socket.send(json.dumps(about | {"header": header, "content": content}))
            said, ends_at = "", time.monotonic() + STEP_S
            while time.monotonic() < ends_at:
                message = json.loads(socket.recv())
                if message["parent_header"].get("msg_id") != number:
                    continue
                said += message["content"].get("text", "")
                if message["msg_type"] == "execute_reply":
                    assert message["content"]["status"] == "ok", message
                if message["content"].get("execution_state") == "idle":
                    return said
            raise AssertionError(f"the cell did not end: {said}")
        finally:
            socket.close()


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    course = TestCourse.make(folder / "course")
    exchange, students = folder / "exchange", folder / "students"
    exchange.mkdir()
    exchange.chmod(0o777)
    students.mkdir()
    shutil.copy(ROOT / "nbgrader_config.py", students)
    (students / ".released-by-autograder").touch()
    for place in (course.root, students):
        with (place / "nbgrader_config.py").open("a") as file:
            file.write(STUDENTS.format(exchange=str(exchange)))
    write_class(LAB, folder / "class")
    course.run("-m", "nbgrader", "release_assignment", LAB)
    hub = Hub(folder, course, students)
    hub.course, hub.exchange = course, exchange
    with hub.running():
        yield hub


def test_a_lab_goes_from_the_instructor_to_students_and_back(hub):
    for user in ("ada", "kim", "teach"):
        hub.begin(user)
    for user, like in (("ada", "reference"), ("kim", "starter")):
        listed = hub.ask("GET", f"/user/{user}/assignments?course_id=minidist", user=user)
        assert [(e["assignment_id"], e["status"]) for e in listed["value"]] == [(LAB, "released")]
        hub.assignment(user, "fetch")
        path = hub.folder / "class" / like / LAB / f"{LAB}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell(f"whose = {user!r}"))
        notebook.metadata["kernelspec"] = {"name": "torchrun-2", "display_name": "2 ranks"}
        work = f"/user/{user}/api/contents/{LAB}/{LAB}.ipynb"
        hub.ask("PUT", work, user=user, body={"type": "notebook", "content": notebook})

    # Ranks in a student's own server.
    assert "[0, 1] in 2 processes" in hub.run("ada", CELL)
    used, files = hub.memory("ada")
    print(f"after a step of DDP: {used >> 20} MiB, and {files >> 20} MiB of files that all share")
    assert 2 * used < LIMIT_BYTES  # Validate starts a kernel of its own

    # Validate, the button, says what the grader will say.
    path = {"path": f"{LAB}/{LAB}.ipynb"}
    assert not hub.assignment("ada", "validate", **path).get("failed")
    for user in ("ada", "kim"):
        hub.assignment(user, "submit")

    # Nobody reaches another's server, and nobody lists what others have handed in.
    for path in (f"ada/api/contents/{LAB}", "ada/api/kernels", "teach/api/contents"):
        assert hub.ask("GET", f"/user/{path}", user="kim", code=None) == 403
    inbound = hub.exchange / "minidist" / "inbound"
    assert inbound.stat().st_mode & 0o777 == 0o733
    assert len(list(inbound.iterdir())) == 2

    # The instructor collects, grades in boxes and releases the feedback.
    hub.course.run(*("-m", "autograder", "watch", "exchange", "--lab", LAB, "--once"))
    pages = {}
    for user in ("ada", "kim"):
        hub.assignment(user, "fetch_feedback")
        place = f"/user/{user}/api/contents/{LAB}/feedback"
        [attempt] = hub.ask("GET", place, user=user)["content"]
        page = f"/user/{user}/api/contents/{attempt['path']}/{LAB}.html"
        pages[user] = hub.ask("GET", page, user=user)["content"]
    assert "<dd>100 of 100</dd>" in pages["ada"]
    assert "<dd>0 of 100</dd>" in pages["kim"]
    listed = hub.ask("GET", f"/user/teach/formgrader/api/submissions/{LAB}", user="teach")
    assert {each["student"]: each["score"] for each in listed} == {"ada": 100.0, "kim": 0.0}

    # An idle kernel gives its ranks' memory back, though its server goes on.
    def has_ranks():
        try:
            return any("minidist.kernel" in " ".join(p.cmdline()) for p in hub.processes("ada"))
        except psutil.NoSuchProcess:  # one has just ended
            return True

    hub.wait(lambda: not has_ranks(), IDLE_S + 120)
    assert hub.processes("ada")


def test_the_ready_configuration_keeps_students_apart():
    """The test's spawner does not; the defaults of the ready file do."""
    from traitlets.config import PyFileConfigLoader

    path = ROOT / "docs" / "hub" / "jupyterhub_config.py"
    config = PyFileConfigLoader(path.name, str(path.parent)).load_config()
    assert config.Spawner.mem_limit == f"{LIMIT_BYTES >> 30}G"
    assert "spawner_class" not in config.JupyterHub  # LocalProcessSpawner: a user each
    assert "authenticator_class" not in config.JupyterHub  # PAM
    assert "allow_all" not in config.Authenticator
