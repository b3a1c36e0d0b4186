"""The local Ray: one per user and installation, started when first needed, shared, ended when nobody uses it.

In: nothing; out: a `LocalRay`, held by `hold()` for as long as it is needed. A small detached keeper process
(`python -m pipelines.local_ray keep`) starts the head, and ends it when for some minutes nobody has held it.

Who does what is decided by `flock`s, which no death leaves behind, in the state folder:
- users.lock: shared by everyone who uses this Ray; the keeper ends Ray only while it holds it alone. Its mtime tells when
  Ray was last in use.
- start.lock: one process at a time sees to it that head and keeper run.
- keeper.lock: held by the keeper, with its pid inside. Only the keeper starts a head and writes head.json.
A process belongs to this Ray when it carries the random id of head.json in its environment, or has one of Ray's own
titles (which overwrite the environment) and an open file in Ray's temporary folder, or descends from such a process.

`python -m pipelines.local_ray status` shows it; `... stop` ends it now unless it is in use.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pipelines.cluster import ENDED, Cluster, ClusterUnreachable, connect, wait_for_end

if TYPE_CHECKING:
    import psutil

START_SECONDS = 90.0  # a head that does not answer by then has failed
END_SECONDS = 10.0  # what Ray gets at each step of an orderly end
POLL_SECONDS = 0.5  # of the keeper
SOCKET_PATH_BYTES = 107  # the kernel's limit
MARK = "VITFLOW_RAY_INSTANCE"

PROJECT = Path(__file__).resolve().parents[1]
_LAYOUT = "1"  # of the state folder
# what of the first user's environment must not reach a Ray that others will use, or a keeper that would end itself
_PRIVATE = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_NAMESPACE",
            MARK)  # fmt: skip
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_prestart_worker_first_driver": "0",  # such workers lack a job's runtime_env and serve no job of ours
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a Ray of one machine lives at 127.0.0.1: networks come and go
}


@dataclass(frozen=True)
class LocalRay:
    """A local Ray that is held: its dashboard's address, its session, and what its clients need to be let in."""

    address: str
    session_name: str
    token_path: Path
    folder: Path = field(repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to talk to this Ray by Ray's own means."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_path)}

    def cluster(self) -> Cluster:
        """A client of its jobs."""
        return connect(self.address, self.token_path)

    def ensure_keeper(self) -> None:
        """See to it that this Ray will be ended some day; cheap, for every poll of a driver."""
        if not _locked(self.folder / "keeper.lock"):
            self.ensure_head()

    def ensure_head(self) -> LocalRay:
        """This Ray while it lives, else a new one with another session. Raises LocalRayError."""
        head = _read_head(self.folder)
        alive = head is not None and head.session_name == self.session_name and head.alive()
        return self if alive and _locked(self.folder / "keeper.lock") else _ensure(self.folder)


class LocalConnection:
    """A driver's way to the local Ray, which is started when `cluster` is first called and held until the end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say`: tells a person what happens."""
        self.say = say
        self.held = ExitStack()
        self.ray: LocalRay | None = None
        self.client: Cluster | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.held.close()

    def cluster(self) -> Cluster:
        """A client of the local Ray, a new one when the old has died. Raises LocalRayError."""
        if self.ray is None:
            self.ray = self.held.enter_context(hold())
            self.client = None
        elif (present := self.ray.ensure_head()) is not self.ray:
            if present.session_name != self.ray.session_name:
                self.say("the local Ray has died; a new one is started")
                self.client = None
            self.ray = present
        if self.client is None:
            self.client = self.ray.cluster()
        return self.client

    def keep(self) -> None:
        """See `LocalRay.ensure_keeper`."""
        if self.ray is not None:
            self.ray.ensure_keeper()


# ------------------------------------------------------------------------------------------------- users


@contextmanager
def hold(folder: Path | None = None) -> Iterator[LocalRay]:
    """Use the local Ray, started when there is none; it is not ended before this is left. Raises LocalRayError."""
    folder = _make_folder(folder or state_folder())
    with _lock(folder / "users.lock", fcntl.LOCK_SH):
        os.utime(folder / "users.lock")
        try:
            yield _ensure(folder)
        finally:
            os.utime(folder / "users.lock")


def connect_running(address: str) -> Cluster:
    """A client of a cluster that is to be there already: the local Ray by its address, or another cluster."""
    folder = state_folder()
    head = _read_head(folder)
    return connect(address, folder / "token" if head is not None and head.address == address else None)


def shut_down(folder: Path | None = None) -> bool:
    """End the local Ray now; False when somebody uses it."""
    folder = _make_folder(folder or state_folder())
    with ExitStack() as locks:
        try:
            locks.enter_context(_lock(folder / "users.lock", fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        locks.enter_context(_lock(folder / "start.lock", fcntl.LOCK_EX))
        while _locked(folder / "keeper.lock"):
            pid = (folder / "keeper.lock").read_text()
            if pid and _mark_of_keeper(int(pid)):
                os.kill(int(pid), signal.SIGTERM)
            time.sleep(0.05)
        if (head := _read_head(folder)) is not None:
            _end(folder, head)
    return True


def state_folder() -> Path:
    """VITFLOW_RAY_DIR, else a folder of the user's cache for this host and installation.

    Another installation (other packages, other code) needs a Ray of its own, and a home may be shared between hosts.
    """
    if given := os.environ.get("VITFLOW_RAY_DIR"):
        return Path(given).absolute()
    import platformdirs

    identity = "\n".join([_LAYOUT, socket.gethostname(), sys.prefix, str(PROJECT)])
    return platformdirs.user_cache_path("vitflow") / "ray" / hashlib.sha256(identity.encode()).hexdigest()[:12]


def _make_folder(folder: Path) -> Path:
    """The state folder, for its owner only, with the token in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    token = folder / "token"
    if not token.exists():
        mine = folder / f"token-{secrets.token_hex(8)}"
        mine.touch(mode=0o600, exist_ok=False)
        mine.write_text(secrets.token_hex(32))
        try:
            token.hardlink_to(mine)
        except FileExistsError:
            pass  # another process was first, and its token is the one
        finally:
            mine.unlink()
    return folder


def _ensure(folder: Path) -> LocalRay:
    """See to it that a head and a keeper run; for whoever holds users.lock. Raises LocalRayError."""
    deadline = time.monotonic() + START_SECONDS
    with _lock(folder / "start.lock", fcntl.LOCK_EX):
        while time.monotonic() < deadline:
            if not _locked(folder / "keeper.lock"):
                _start_keeper(folder)
            elif (found := _answering(folder)) is not None:
                return found
            else:  # its keeper is about to start it, or to clear away a dead one
                time.sleep(0.05)
    raise LocalRayError(f"the local Ray of {folder} does not answer; see {folder / 'keeper.log'}")


def _answering(folder: Path) -> LocalRay | None:
    """The local Ray when it lives and answers. Raises LocalRayError when it is of another version."""
    head = _read_head(folder)
    if head is None or not head.alive():
        return None
    if (installed := importlib.metadata.version("ray")) != head.ray_version:
        raise LocalRayError(
            f"the local Ray runs version {head.ray_version}, installed is {installed}: end it with "
            f"`{sys.executable} -m pipelines.local_ray stop`"
        )
    ray = LocalRay(head.address, head.session_name, folder / "token", folder)
    try:
        return ray if ray.cluster().session_name == head.session_name else None
    except ClusterUnreachable:
        return None


def _start_keeper(folder: Path) -> None:
    """Start a keeper and wait until its head answers. Raises LocalRayError with the reason when it does not."""
    environment = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
    environment |= {"PYTHONPATH": _python_path(), "VITFLOW_RAY_DIR": str(folder)}
    with (folder / "keeper.log").open("ab") as log:
        started = subprocess.run(
            [sys.executable, "-m", "pipelines.local_ray", "keep"], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=log, text=True, check=False, start_new_session=True,
        )  # fmt: skip
    if started.stdout.strip() != "ready":
        raise LocalRayError(
            f"the local Ray did not start: {started.stdout.strip() or 'its keeper died'}\n"
            f"(see also {folder / 'keeper.log'})"
        )


def _python_path() -> str:
    """Let `python -m ray_jobs...` work from everywhere."""
    return os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))


# ------------------------------------------------------------------------------------------------- the keeper


def keep(folder: Path) -> None:
    """The keeper: say "ready" (or why not) on stdout, then watch over the head until it is dead or not needed."""
    if os.fork():  # nobody's child: whoever started it may live longer or shorter
        os._exit(0)
    os.setsid()
    idle_seconds = float(os.environ.get("VITFLOW_RAY_IDLE_SECONDS", "300"))
    with ExitStack() as locks:
        try:
            lock = locks.enter_context(_lock_soon(folder / "keeper.lock"))
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
            head = _read_head(folder)
            if head is None or not head.alive():
                if head is not None:
                    _end(folder, head)
                head = _start_head(folder)
        except (OSError, LocalRayError) as error:
            _report(str(error))
            sys.exit(1)
        _report("ready")
        _watch(folder, head, idle_seconds)


def _report(text: str) -> None:
    """Tell who started this keeper, who waits for stdout to be closed."""
    _log(text)
    with open(os.devnull, "wb") as nothing:
        try:
            os.write(1, text.encode())
        except BrokenPipeError:
            pass  # it is gone; the log has it
        os.dup2(nothing.fileno(), 1)


def _log(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} keeper {os.getpid()}: {text}", file=sys.stderr, flush=True)


def _watch(folder: Path, head: Head, idle_seconds: float) -> None:
    users = folder / "users.lock"
    while True:
        time.sleep(min(POLL_SECONDS, idle_seconds / 4))
        _reap()
        if not head.alive():
            _log("the head has died")
            _end(folder, head)
            return
        try:
            with _lock(users, fcntl.LOCK_EX | fcntl.LOCK_NB):
                if time.time() - users.stat().st_mtime >= idle_seconds:
                    _log("nobody uses this Ray")
                    _end(folder, head)
                    return
        except BlockingIOError:
            os.utime(users)


def _reap() -> None:
    """Let no dead child look alive."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # an adopted head is not ours


# ------------------------------------------------------------------------------------------------- locks


@contextmanager
def _lock(path: Path, kind: int) -> Iterator[int]:
    """Hold an flock; raises BlockingIOError when it cannot be had at once and LOCK_NB is asked for."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(opened, kind)
        yield opened
    finally:
        os.close(opened)


@contextmanager
def _keeper_lock(folder: Path) -> Iterator[int]:
    """The keeper's lock; whoever looks whether there is a keeper has it for a moment."""
    for attempt in range(40):
        try:
            with _lock(folder / "keeper.lock", fcntl.LOCK_EX | fcntl.LOCK_NB) as opened:
                yield opened
                return
        except BlockingIOError:
            time.sleep(0.025)
    raise LocalRayError(...)


def _locked(path: Path) -> bool:
    """Whether some process holds this lock alone."""
    try:
        with _lock(path, fcntl.LOCK_SH | fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True


# ------------------------------------------------------------------------------------------------- command line


def main(arguments: list[str]) -> int:
    """`keep` is for `hold` alone; `status` and `stop` are for people."""
    folder = _make_folder(state_folder())
    match arguments:
        case ["keep"]:
            keep(folder)
        case ["status"]:
            head = read_head(folder)
            state = {"folder": str(folder), "keeper": _locked(folder / "keeper.lock"),
                     "alive": head is not None and head.alive(), "head": head and asdict(head)}  # fmt: skip
            print(json.dumps(state, indent=1))
        case ["stop"]:
            if not shut_down(folder):
                print("the local Ray is in use", file=sys.stderr)
                return 1
        case _:
            print("usage: python -m pipelines.local_ray status|stop", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
