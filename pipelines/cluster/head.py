"""The head of a local Ray: starting it, checking that it is alive, stopping it and all its processes.

In: a state folder with a `token` and, after a head was started, its record `head.json`. `pipelines.cluster.local` uses
this module; its locks ensure that only one process at a time starts or stops a head.

A process belongs to our Ray if it has the random id of head.json in its environment, or if it has one of Ray's process
titles (which overwrite the environment) and an open file in Ray's temporary folder, or if it descends from such a
process. So other users' Rays are never touched, and a dead head can be cleaned up from its record alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
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

import psutil

from pipelines.cluster.jobs_client import Cluster, ClusterUnreachable, connect, wait_for_end

START_SECONDS = 300.0  # for a head to answer on a busy machine; its death is noticed at once
END_SECONDS = 10.0  # for each step of an orderly shutdown
SOCKET_PATH_BYTES = 107  # the kernel's limit
MARK = "VITFLOW_RAY_INSTANCE"

PROJECT = Path(__file__).resolve().parents[2]
# Environment variables that must not reach a shared Ray: private ones of the first user, those that a parallel launcher
# sets for one process, and those that change how every Python program runs.
_PRIVATE = {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR", MARK}
_LAUNCHED = re.compile(
    r"(LOCAL_)?(RANK|WORLD_SIZE)|(NODE|GROUP)_RANK|MASTER_(ADDR|PORT)"
    r"|(OMPI|PMI|PMIX|PRTE|MPI|MPIEXEC|MV2|HYDRA|TORCHELASTIC)_.*|SLURM.*"
)
_PYTHON = re.compile(r"PYTHON(OPTIMIZE|WARNINGS|INSPECT|STARTUP|DEBUG|VERBOSE)")
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_prestart_worker_first_driver": "0",  # our jobs cannot use such workers, which lack their runtime_env
}


class LocalRayError(RuntimeError):
    """The local Ray could not be started, or must not be used; the message says why."""


@dataclass(frozen=True)
class Head:
    """The record head.json. The first two fields are written before Ray is started, the others when it answers."""

    instance: str
    temp_folder: str
    started_at: float = 0.0
    address: str = ""
    gcs_address: str = ""
    session_name: str = ""
    ray_version: str = ""
    # of the vital processes; `ray start` watches the others
    pids: dict[str, int] = field(default_factory=dict)

    @property
    def ray_folder(self) -> Path:
        """The folder for Ray, inside a private folder because Ray makes its own accessible to everyone."""
        return Path(self.temp_folder) / "r"

    def alive(self) -> bool:
        """Whether every vital process is running; the id in the environment excludes reused pids."""
        return bool(self.pids) and all(_mark(pid) == self.instance for pid in self.pids.values())


def start_head(folder: Path) -> Head:
    """Start `ray start --head` and wait until it answers; if it does not, clean up everything."""
    head = Head(secrets.token_hex(16), str(make_temp_folder()), time.time())
    write_head(folder, head)
    try:
        port, client_port = _free_ports(2)
        with (Path(head.temp_folder) / "head.log").open("wb") as log:
            process = subprocess.Popen(
                _ray_start(head, port, client_port),
                cwd=head.temp_folder,
                env=_head_environment(folder, head),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return _wait_for_head(folder, head, process, connect(f"http://127.0.0.1:{port}", folder / "token"))
    except BaseException:
        end_head(folder, head)
        raise


def _ray_start(head: Head, port: int, client_port: int) -> list[str]:
    options = {
        "log-color": "false",
        "port": 0,
        "node-ip-address": "127.0.0.1",
        "include-dashboard": "true",
        "dashboard-host": "127.0.0.1",
        "dashboard-port": port,
        "dashboard-agent-listen-port": 0,
        "temp-dir": head.ray_folder,
        "ray-client-server-port": client_port,  # it cannot be turned off, and only one Ray can use the default port
    }
    # no monitor: there is nothing to scale, and it takes 1.3 s to start
    flags = ["--head", "--block", "--no-monitor", "--disable-usage-stats"]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start"]
    return [*ray, *flags, *(f"--{name}={value}" for name, value in options.items())]


def _head_environment(folder: Path, head: Head) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    own = {MARK: head.instance, "PATH": path, "PYTHONPATH": python_path()} | client_environment(folder / "token")
    return inherited() | _SETTINGS | own


def inherited() -> dict[str, str]:
    """Return the environment variables of this process that a shared Ray takes over."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _PRIVATE and not _LAUNCHED.fullmatch(name) and not _PYTHON.fullmatch(name)
    }


def suspects() -> list[str]:
    """Return the names of variables that change how Ray or Python works and that a shared Ray takes over."""
    return sorted(name for name in inherited().keys() - _SETTINGS.keys() if name.startswith(("RAY_", "PYTHON", "LD_")))


def _wait_for_head(folder: Path, head: Head, process: subprocess.Popen[bytes], cluster: Cluster) -> Head:
    reason = ""
    while time.time() - head.started_at < START_SECONDS:
        if process.poll() is not None:
            lines = (Path(head.temp_folder) / "head.log").read_text(errors="replace").strip().splitlines()[-15:]
            raise LocalRayError("\n".join([f"`ray start` ended with exit code {process.returncode}:", *lines]))
        try:
            children = {child.name(): child.pid for child in psutil.Process(process.pid).children()}
            if "raylet" in children:  # it starts last
                vital = {name: children[name] for name in ("gcs_server", "raylet")}
                complete = replace(
                    head,
                    address=cluster.address,
                    session_name=cluster.session_name,
                    gcs_address=(head.ray_folder / "ray_current_cluster").read_text().strip(),
                    ray_version=importlib.metadata.version("ray"),
                    pids={"ray start": process.pid, **vital},
                )
                write_head(folder, complete)
                return complete
        except (ClusterUnreachable, ValueError, psutil.Error, FileNotFoundError) as error:
            reason = str(error)
        time.sleep(0.05)
    raise LocalRayError(f"`ray start` did not answer within {START_SECONDS:.0f} s: {reason}")


def client_environment(token_path: Path) -> dict[str, str]:
    """Return the environment of processes that use a local Ray through Ray's API, and of Ray's own processes."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        # Despite its name, it makes Ray stay on 127.0.0.1, where changes of the network do not matter and other
        # machines have no access. Without it Ray ignores its options and uses the address of the host.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def python_path() -> str:
    """Return a PYTHONPATH with which `python -m ray_jobs...` works in any folder."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(PROJECT), *(path for path in paths if path not in {"", str(PROJECT)})])


def read_head(folder: Path) -> Head | None:
    """Read the record of the state folder's Ray, alive or dead; None if there is none."""
    try:
        return Head(**json.loads((folder / "head.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None  # absent, or truncated by a power failure, which also ended that Ray


def write_head(folder: Path, head: Head) -> None:
    """Replace the record atomically, so that no process reads half of it."""
    new = folder / "head.json.new"
    with new.open("w") as file:
        file.write(json.dumps(asdict(head), indent=1))
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / "head.json")


def _free_ports(count: int) -> list[int]:
    """Return free ports outside the range of Ray's workers."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if not 10002 <= port <= 19999 and port not in ports:
            ports.append(port)
    return ports


def make_temp_folder() -> Path:
    """Create a temporary folder for Ray with a path short enough for its sockets. Raises LocalRayError."""
    longest = "/vf-12345678/r/session_2026-11-21_08-30-42_885487_1234567/sockets/dash_PlatformEventHead"
    for parent in dict.fromkeys([tempfile.gettempdir(), "/tmp"]):  # noqa: S108 (mkdtemp makes it ours alone)
        if len(os.fsencode(parent + longest)) <= SOCKET_PATH_BYTES and os.access(parent, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="vf-", dir=parent))
    raise LocalRayError(
        f"Ray needs a writable folder with a short path (at most {SOCKET_PATH_BYTES - len(longest)} bytes), and "
        f"neither {tempfile.gettempdir()} nor /tmp is one; set TMPDIR"
    )


# ------------------------------------------------------------------------------------------------- stopping


def end_head(folder: Path, head: Head) -> None:
    """Shut a Ray down, kill its remaining processes, and remove its temporary folder and its record."""
    if head.alive():
        _stop_jobs(folder, head)
        main = psutil.Process(head.pids["ray start"])
        main.send_signal(signal.SIGTERM)
        _wait_until(lambda: not _is_alive(main))
    deadline = time.monotonic() + END_SECONDS
    while (remaining := processes_of(head)) and time.monotonic() < deadline:
        for process in remaining:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.05)
    shutil.rmtree(head.temp_folder, ignore_errors=True)
    if (recorded := read_head(folder)) is not None and recorded.instance == head.instance:
        (folder / "head.json").unlink()


def _stop_jobs(folder: Path, head: Head) -> None:
    """Stop all jobs, because a running job delays the effect of SIGTERM by 30 s."""
    try:
        cluster = connect(head.address, folder / "token")
        running = {job.submission_id for job in cluster.jobs() if not job.ended}
        for submission_id in running:
            cluster.stop(submission_id)
        wait_for_end(cluster, running, END_SECONDS)
    except (ClusterUnreachable, ValueError):
        pass  # no answer, or the token is gone: the jobs end with their processes


def processes_of(head: Head) -> list[psutil.Process]:
    """Return every live process that belongs to a Ray, except this one."""
    parents: dict[int, int] = {}
    members: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            parents[process.pid] = process.ppid()
            if _belongs(process, head):
                members[process.pid] = process
        except psutil.Error:
            continue
    for pid in parents:
        ancestry = [pid]
        while ancestry[-1] not in members and parents.get(ancestry[-1], 0) > 1:
            ancestry.append(parents[ancestry[-1]])
        if ancestry[-1] in members:
            members |= {
                descendant: psutil.Process(descendant)
                for descendant in ancestry
                if descendant not in members and psutil.pid_exists(descendant)
            }
    return [process for process in members.values() if process.pid != os.getpid() and _is_alive(process)]


def _mark(pid: int) -> str | None:
    """Return the Ray's id in a process's environment; None also if it is dead, a zombie, or another user's."""
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


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
