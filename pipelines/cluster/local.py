"""The local Ray: one per user and installation, started when first needed, shared, and ended when it is idle.

Out: a `LocalRay`, held by `hold()` as long as it is needed. A small detached keeper process
(`python -m pipelines.cluster.local keep`) starts the head, and ends it after some minutes without users.

The processes coordinate by `flock`s in the state folder, which the kernel releases when a process dies:
- users.lock: shared by all users of this Ray; the keeper ends Ray only while it holds this lock exclusively. Its mtime
  is the time of the last use.
- start.lock: held by the one process that ensures that head and keeper are running.
- keeper.lock: held by the keeper, and contains its pid. Only the keeper starts a head and writes head.json.
`pipelines.cluster.head` starts and ends a head, and knows which processes belong to it.

`python -m pipelines.cluster.local status` shows its state; `... stop` ends it now unless it is in use.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import platformdirs
import psutil

from pipelines.cluster.head import (
    PROJECT,
    START_SECONDS,
    Head,
    LocalRayError,
    end_head,
    inherited,
    python_path,
    read_head,
    start_head,
    suspects,
)
from pipelines.cluster.jobs_client import Cluster, ClusterUnreachable, connect

__all__ = ["LocalConnection", "LocalRay", "LocalRayError", "connect_running", "hold", "shut_down"]

ENSURE_SECONDS = START_SECONDS + 30.0  # a dead head is cleaned up before the next one starts
POLL_SECONDS = 0.5  # of the keeper
_LAYOUT = "1"  # of the state folder


@dataclass(frozen=True)
class LocalRay:
    """A local Ray that is held: the address of its dashboard, its session, and the token for its clients."""

    address: str
    session_name: str
    token_path: Path
    folder: Path = field(repr=False)

    def cluster(self) -> Cluster:
        """Return a client of its jobs."""
        return connect(self.address, self.token_path)

    def ensure_keeper(self) -> None:
        """Make sure that a keeper is running; cheap enough for every poll of a driver."""
        if not _locked(self.folder / "keeper.lock"):
            self.ensure_head()

    def ensure_head(self) -> LocalRay:
        """Return this Ray if it is alive, else start a new one with another session. Raises LocalRayError."""
        head = read_head(self.folder)
        alive = head is not None and head.session_name == self.session_name and head.alive()
        return self if alive and _locked(self.folder / "keeper.lock") else _ensure(self.folder)


class LocalConnection:
    """A driver's connection to the local Ray, which the first call of `cluster` starts; it is held until the end."""

    def __init__(self, say: Callable[[str], None], folder: Path | None = None) -> None:
        """`say`: prints a message; `folder`: the state folder, None for the default."""
        self.say, self.folder = say, folder
        self.held = ExitStack()
        self.ray: LocalRay | None = None
        self.client: Cluster | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()

    def cluster(self) -> Cluster:
        """Return a client of the local Ray, or of a new one if the old one has died. Raises LocalRayError."""
        if self.ray is None:
            self.ray = self.held.enter_context(hold(self.folder))
        elif (current := self.ray.ensure_head()) is not self.ray:
            if current.session_name != self.ray.session_name:
                self.say("the local Ray has died; starting a new one")
                self.client = None
            self.ray = current
        if self.client is None:
            self.client = self.ray.cluster()
        return self.client

    def keep(self) -> None:
        """Do `LocalRay.ensure_keeper` if this Ray was started."""
        if self.ray is not None:
            self.ray.ensure_keeper()


# ------------------------------------------------------------------------------------------------- users


@contextmanager
def hold(folder: Path | None = None) -> Iterator[LocalRay]:
    """Yield the local Ray, started if needed; it keeps running during the block. Raises LocalRayError."""
    folder = _make_folder(folder or state_folder())
    with _lock(folder / "users.lock", fcntl.LOCK_SH) as opened:
        os.utime(opened)
        try:
            yield _ensure(folder)
        finally:
            os.utime(opened)


def connect_running(address: str) -> Cluster:
    """Return a client of an existing cluster; for the local Ray's address, with its token."""
    folder = state_folder()
    head = read_head(folder)
    return connect(address, folder / "token" if head is not None and head.address == address else None)


def shut_down(folder: Path | None = None) -> bool:
    """End the local Ray now; return False, and do nothing, if it is in use."""
    folder = _make_folder(folder or state_folder())
    with ExitStack() as locks:
        try:
            locks.enter_context(_lock(folder / "users.lock", fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        locks.enter_context(_lock(folder / "start.lock", fcntl.LOCK_EX))
        while _locked(folder / "keeper.lock"):
            _end_keeper(folder)
            time.sleep(0.05)
        if (head := read_head(folder)) is not None:
            end_head(folder, head)
    return True


def _end_keeper(folder: Path) -> None:
    """Kill the keeper, but not its Ray."""
    pid = (folder / "keeper.lock").read_text()
    try:
        keeper = psutil.Process(int(pid))
        if "pipelines.cluster.local" in keeper.cmdline():
            keeper.kill()
    except (ValueError, psutil.Error):
        return  # it is about to write its pid, or has just ended


def state_folder() -> Path:
    """Return VITFLOW_RAY_DIR, else a folder in the user's cache for this host and installation.

    Each installation (packages and code) needs its own Ray, and several hosts may share a home folder.
    """
    if folder := os.environ.get("VITFLOW_RAY_DIR"):
        return Path(folder).absolute()
    identity = "\n".join([_LAYOUT, socket.gethostname(), sys.prefix, str(PROJECT)])
    name = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return platformdirs.user_cache_path("vitflow") / "ray" / name


def _make_folder(folder: Path) -> Path:
    """Create the state folder, accessible only to its owner, with the token in it."""
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
            pass  # another process was first; its token is used
        finally:
            mine.unlink()
    return folder


def _ensure(folder: Path) -> LocalRay:
    """Make sure that a head and a keeper are running; the caller holds users.lock. Raises LocalRayError."""
    deadline = time.monotonic() + ENSURE_SECONDS
    with _lock(folder / "start.lock", fcntl.LOCK_EX):
        while time.monotonic() < deadline:
            if not _locked(folder / "keeper.lock"):
                _start_keeper(folder)
            elif (ray := _answering(folder)) is not None:
                return ray
            else:  # the keeper is starting it, or cleaning up a dead one
                time.sleep(0.05)
    raise LocalRayError(f"the local Ray in {folder} does not answer; see {folder / 'keeper.log'}")


def _answering(folder: Path) -> LocalRay | None:
    """Return the local Ray if it is alive and answers. Raises LocalRayError if it has another version."""
    head = read_head(folder)
    if head is None or not head.alive():
        return None
    if (installed := importlib.metadata.version("ray")) != head.ray_version:
        raise LocalRayError(
            f"the local Ray runs version {head.ray_version}, but version {installed} is installed; end it with "
            f"`{sys.executable} -m pipelines.cluster.local stop`"
        )
    ray = LocalRay(head.address, head.session_name, folder / "token", folder)
    try:
        return ray if ray.cluster().session_name == head.session_name else None
    except ClusterUnreachable:
        return None


def _start_keeper(folder: Path) -> None:
    """Start a keeper and wait until its head answers. Raises LocalRayError, with the reason, if it does not."""
    environment = inherited() | {"PYTHONPATH": python_path(), "VITFLOW_RAY_DIR": str(folder)}
    command = [sys.executable, "-m", "pipelines.cluster.local", "keep"]
    try:
        with (folder / "keeper.log").open("ab") as log:
            keeper = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
                start_new_session=True,
                timeout=ENSURE_SECONDS,
            )
        answer = keeper.stdout.strip()
    except subprocess.TimeoutExpired:
        answer = f"its keeper did not answer within {ENSURE_SECONDS:.0f} s"
    if answer != "ready":
        reason = answer or "its keeper died"
        found = suspects()
        names = f"; Ray takes these variables from the environment: {', '.join(found)}" if found else ""
        raise LocalRayError(f"the local Ray did not start: {reason}\n(see also {folder / 'keeper.log'}{names})")


# ------------------------------------------------------------------------------------------------- the keeper


def keep(folder: Path) -> None:
    """Run as the keeper: write "ready" or an error to stdout, then watch the head until it has died or is idle."""
    if os.fork():  # detach from the process that started it, which may end earlier or later
        os._exit(0)
    os.setsid()
    idle_seconds = float(os.environ.get("VITFLOW_RAY_IDLE_SECONDS", "300"))
    with ExitStack() as locks:
        try:
            lock = _lock_soon(folder / "keeper.lock", locks)
        except BlockingIOError:
            _report("ready")  # another keeper is running
            return
        try:
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
            head = _adopt_or_start(folder)
        except (OSError, LocalRayError) as error:
            _report(str(error))
            sys.exit(1)
        _report("ready")
        _watch(folder, head, idle_seconds)


def _adopt_or_start(folder: Path) -> Head:
    head = read_head(folder)
    if head is not None and head.alive():
        return head
    if head is not None:
        end_head(folder, head)
    return start_head(folder)


def _report(text: str) -> None:
    """Write to the process that started this keeper, and close stdout, for which it waits."""
    _log(text)
    with suppress(BrokenPipeError):  # that process is gone
        os.write(1, text.encode())
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)


def _log(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} keeper {os.getpid()}: {text}", file=sys.stderr, flush=True)


def _watch(folder: Path, head: Head, idle_seconds: float) -> None:
    users = folder / "users.lock"
    while True:
        time.sleep(min(POLL_SECONDS, idle_seconds / 4))
        _reap()
        if not head.alive() or read_head(folder) != head:
            _log("the head has died, or its record was removed")
            end_head(folder, head)
            return
        try:
            with _lock(users, fcntl.LOCK_EX | fcntl.LOCK_NB):
                if time.time() - users.stat().st_mtime >= idle_seconds:
                    _log("this Ray is idle")
                    end_head(folder, head)
                    return
        except BlockingIOError:
            os.utime(users)


def _reap() -> None:
    """Wait for dead children, which would otherwise look alive."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # an adopted head is not ours


# ------------------------------------------------------------------------------------------------- locks


@contextmanager
def _lock(path: Path, kind: int) -> Iterator[int]:
    """Hold an flock. Raises BlockingIOError if it is not free and `kind` includes LOCK_NB."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(opened, kind)
        yield opened
    finally:
        os.close(opened)


def _lock_soon(path: Path, locks: ExitStack) -> int:
    """Hold an flock that others may hold for a moment, to check whether it is held. Raises BlockingIOError."""
    deadline = time.monotonic() + 1.0
    while True:
        try:
            return locks.enter_context(_lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.025)


def _locked(path: Path) -> bool:
    """Whether a process holds this lock exclusively."""
    try:
        with _lock(path, fcntl.LOCK_SH | fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True


# ------------------------------------------------------------------------------------------------- command line


def main(arguments: list[str]) -> int:
    """Run `keep` (started by `hold`), `status` or `stop`; return the exit code."""
    folder = _make_folder(state_folder())
    match arguments:
        case ["keep"]:
            keep(folder)
        case ["status"]:
            head = read_head(folder)
            state = {
                "folder": str(folder),
                "keeper": _locked(folder / "keeper.lock"),
                "alive": head is not None and head.alive(),
                "head": head and asdict(head),
            }
            print(json.dumps(state, indent=1))
        case ["stop"]:
            if not shut_down(folder):
                print("the local Ray is in use", file=sys.stderr)
                return 1
        case _:
            print("usage: python -m pipelines.cluster.local status|stop", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
