"""The head of a local Ray: start it, tell whether it lives, end it with everything that belongs to it.

In: a state folder with a `token` and, once a head was started, its record `head.json`. Used by
`pipelines.cluster.local`, whose locks see to it that one process at a time starts or ends a head.

A process belongs to a Ray of ours when it carries the random id of head.json in its environment, or has one of Ray's
own titles (which overwrite the environment) and an open file in Ray's temporary folder, or descends from such a
process. So nobody else's Ray is ever touched, and nothing is needed of a dead head but its record.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pipelines.cluster.jobs_client import Cluster, ClusterUnreachable, connect, wait_for_end

if TYPE_CHECKING:
    import psutil

START_SECONDS = 60.0  # a head that does not answer by then has failed
END_SECONDS = 10.0  # what Ray gets at each step of an orderly end
SOCKET_PATH_BYTES = 107  # the kernel's limit
MARK = "VITFLOW_RAY_INSTANCE"

PROJECT = Path(__file__).resolve().parents[2]
# what of the first user's environment must not reach a Ray that others will use
PRIVATE = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR", MARK)
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_prestart_worker_first_driver": "0",  # such workers lack a job's runtime_env and serve no job of ours
}


class LocalRayError(RuntimeError):
    """The local Ray could not be started, or is not to be used; the message says why."""


@dataclass(frozen=True)
class Head:
    """head.json: a Ray of ours. The first two fields are written before it is started, the rest when it answers."""

    instance: str
    temp_folder: str
    started_at: float = 0.0
    address: str = ""
    gcs_address: str = ""
    session_name: str = ""
    ray_version: str = ""
    pids: dict[str, int] = field(
        default_factory=dict
    )  # without these it is dead; `ray start` minds the others

    @property
    def ray_folder(self) -> Path:
        """What Ray is given: it opens its folder to everyone, so that this one lies in another, which is closed."""
        return Path(self.temp_folder) / "r"

    def alive(self) -> bool:
        """Whether every vital process is there; another process with a reused pid does not carry the id."""
        return bool(self.pids) and all(_mark(pid) == self.instance for pid in self.pids.values())


def start_head(folder: Path) -> Head:
    """Start `ray start --head` and wait until it answers; leaves nothing behind when it does not."""
    head = Head(secrets.token_hex(16), str(make_temp_folder()), time.time())
    write_head(folder, head)
    try:
        port, client_port = _free_ports(2)
        with (Path(head.temp_folder) / "head.log").open("wb") as log:
            process = subprocess.Popen(
                _ray_start(head, port, client_port), cwd=head.temp_folder, env=_head_environment(folder, head),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return _wait_for_head(folder, head, process, connect(f"http://127.0.0.1:{port}", folder / "token"))
    except BaseException:
        end_head(folder, head)
        raise


def _ray_start(head: Head, port: int, client_port: int) -> list[str]:
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--log-color=false", "--port=0",
        "--node-ip-address=127.0.0.1", "--include-dashboard=true", "--dashboard-host=127.0.0.1",
        f"--dashboard-port={port}", "--dashboard-agent-listen-port=0", f"--temp-dir={head.ray_folder}",
        f"--ray-client-server-port={client_port}",  # not to be had without; its default would be taken by one Ray only
        "--no-monitor",  # there is nothing to scale, and it costs 1.3 s at the start
        "--disable-usage-stats",
    ]  # fmt: skip


def _head_environment(folder: Path, head: Head) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    own = {MARK: head.instance, "PATH": path, "PYTHONPATH": python_path()} | client_environment(
        folder / "token"
    )
    return {name: value for name, value in os.environ.items() if name not in PRIVATE} | _QUIET | own


def _wait_for_head(folder: Path, head: Head, process: subprocess.Popen[bytes], cluster: Cluster) -> Head:

    reason = ""
    while time.time() - head.started_at < START_SECONDS:
        if process.poll() is not None:
            lines = (
                (Path(head.temp_folder) / "head.log").read_text(errors="replace").strip().splitlines()[-15:]
            )
            raise LocalRayError(
                "\n".join([f"`ray start` ended with exit code {process.returncode}:", *lines])
            )
        try:
            children = {child.name(): child.pid for child in psutil.Process(process.pid).children()}
            if "raylet" in children:  # the last to be started
                complete = replace(
                    head, address=cluster.address, session_name=cluster.session_name,
                    gcs_address=(head.ray_folder / "ray_current_cluster").read_text().strip(),
                    ray_version=importlib.metadata.version("ray"),
                    pids={"ray start": process.pid, **{name: children[name] for name in ("gcs_server", "raylet")}},
                )  # fmt: skip
                write_head(folder, complete)
                return complete
        except (ClusterUnreachable, ValueError, psutil.Error, FileNotFoundError) as error:
            reason = str(error)
        time.sleep(0.05)
    raise LocalRayError(f"`ray start` did not come up in {START_SECONDS:.0f} s: {reason}")


def client_environment(token_path: Path) -> dict[str, str]:
    """What a process needs that is to talk to a local Ray by Ray's own means; Ray's own processes need it as well.

    The last one is named for other systems, and means: at 127.0.0.1, where a change of network does not matter and no
    neighbour can knock. Without it Ray takes the address of the host, whatever it is told.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # fmt: skip


def python_path() -> str:
    """Let `python -m ray_jobs...` work from everywhere."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(PROJECT), *(path for path in given if path not in {"", str(PROJECT)})])


def read_head(folder: Path) -> Head | None:
    """The record of the state folder's Ray, alive or dead."""
    try:
        return Head(**json.loads((folder / "head.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None  # not there, or cut off by a power failure, after which no Ray of it lives


def write_head(folder: Path, head: Head) -> None:
    """Replace the record at once, so that nobody reads half of one."""
    new = folder / "head.json.new"
    with new.open("w") as file:
        file.write(json.dumps(asdict(head), indent=1))
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / "head.json")


def _free_ports(count: int) -> list[int]:
    """Free ports outside the range of Ray's workers."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if not 10002 <= port <= 19999 and port not in ports:
            ports.append(port)
    return ports


def make_temp_folder() -> Path:
    """A folder for Ray, short enough for its sockets. Raises LocalRayError."""
    longest = "/vf-12345678/r/session_2026-11-21_08-30-42_885487_1234567/sockets/dash_PlatformEventHead"
    for parent in dict.fromkeys([tempfile.gettempdir(), "/tmp"]):  # noqa: S108 (mkdtemp makes it ours alone)
        if len(os.fsencode(parent + longest)) <= SOCKET_PATH_BYTES and os.access(parent, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="vf-", dir=parent))
    raise LocalRayError(
        f"Ray needs a folder that can be written and has a short path ({SOCKET_PATH_BYTES - len(longest)} bytes at "
        f"most): neither {tempfile.gettempdir()} nor /tmp will do; set TMPDIR"
    )


# ------------------------------------------------------------------------------------------------- the end


def end_head(folder: Path, head: Head) -> None:
    """End a Ray in order, then whatever is left of it; remove its temporary folder and its record."""
    if head.alive():
        _stop_jobs(folder, head)
        main = psutil.Process(head.pids["ray start"])
        main.send_signal(signal.SIGTERM)
        _wait_until(lambda: not _lives(main))
    deadline = time.monotonic() + END_SECONDS
    while (left := processes_of(head)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.05)
    shutil.rmtree(head.temp_folder, ignore_errors=True)
    if (recorded := read_head(folder)) is not None and recorded.instance == head.instance:
        (folder / "head.json").unlink()


def _stop_jobs(folder: Path, head: Head) -> None:
    """A job that is running would let a SIGTERM wait for 30 s."""
    try:
        cluster = connect(head.address, folder / "token")
        running = {job.submission_id for job in cluster.jobs() if not job.ended}
        for submission_id in running:
            cluster.stop(submission_id)
        wait_for_end(cluster, running, END_SECONDS)
    except (ClusterUnreachable, ValueError):
        pass  # no answer, or no token any more: they end with their processes


def processes_of(head: Head) -> list[psutil.Process]:
    """Every living process that belongs to a Ray, this one excepted."""
    parents: dict[int, int] = {}
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            parents[process.pid] = process.ppid()
            if _belongs(process, head):
                found[process.pid] = process
        except psutil.Error:
            continue
    for pid in parents:
        line = [pid]
        while line[-1] not in found and parents.get(line[-1], 0) > 1:
            line.append(parents[line[-1]])
        if line[-1] in found:
            found |= {
                each: psutil.Process(each) for each in line if each not in found and psutil.pid_exists(each)
            }
    return [process for process in found.values() if process.pid != os.getpid() and _lives(process)]


def _mark(pid: int) -> str | None:
    """Which Ray of ours a process says that it belongs to; None too when it is dead, a zombie, or another user's."""
    try:
        return psutil.Process(pid).environ().get(MARK)
    except (psutil.Error, OSError):
        return None


def _belongs(process: psutil.Process, head: Head) -> bool:

    if process.uids().real != os.getuid():
        return False
    try:
        if _mark(process.pid) == head.instance:
            return True
        if not " ".join(process.cmdline()).startswith(("ray::", "ray-dashboard-")):
            return False
        return any(Path(file.path).is_relative_to(head.temp_folder) for file in process.open_files())
    except (psutil.Error, OSError):
        return False


def _lives(process: psutil.Process) -> bool:

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
