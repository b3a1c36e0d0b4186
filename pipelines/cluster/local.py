"""The local Ray: one per user and installation, started when first needed, shared, ended when nobody uses it.

In: nothing; out: a `LocalRay`, held by `hold()` for as long as it is needed. A small detached keeper process
(`python -m pipelines.cluster.local keep`) starts the head, and ends it when for some minutes nobody has held it.

Who does what is decided by `flock`s, which no death leaves behind, in the state folder:
- users.lock: shared by everyone who uses this Ray; the keeper ends Ray only while it holds it alone. Its mtime tells
  when Ray was last in use.
- start.lock: one process at a time sees to it that head and keeper run.
- keeper.lock: held by the keeper, with its pid inside. Only the keeper starts a head and writes head.json.
What a head is, and which processes belong to it, is told by `pipelines.cluster.head`.

`python -m pipelines.cluster.local status` shows it; `... stop` ends it now unless it is in use.
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
from types import TracebackType
from typing import Self

from pipelines.cluster.head import (
    PRIVATE,
    PROJECT,
    START_SECONDS,
    Head,
    LocalRayError,
    client_environment,
    end_head,
    python_path,
    read_head,
    start_head,
)
from pipelines.cluster.jobs_client import Cluster, ClusterUnreachable, connect

__all__ = ["LocalConnection", "LocalRay", "LocalRayError", "connect_running", "hold", "shut_down"]

ENSURE_SECONDS = START_SECONDS + 30.0  # a dead head is cleared away before the next is started
POLL_SECONDS = 0.5  # of the keeper
_LAYOUT = "1"  # of the state folder


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
        return client_environment(self.token_path)

    def cluster(self) -> Cluster:
        """A client of its jobs."""
        return connect(self.address, self.token_path)

    def ensure_keeper(self) -> None:
        """See to it that this Ray will be ended some day; cheap, for every poll of a driver."""
        if not _locked(self.folder / "keeper.lock"):
            self.ensure_head()

    def ensure_head(self) -> LocalRay:
        """This Ray while it lives, else a new one with another session. Raises LocalRayError."""
        head = read_head(self.folder)
        alive = head is not None and head.session_name == self.session_name and head.alive()
        return self if alive and _locked(self.folder / "keeper.lock") else _ensure(self.folder)


class LocalConnection:
    """A driver's way to the local Ray, which is started when `cluster` is first called and held until the end."""

    def __init__(self, say: Callable[[str], None], folder: Path | None = None) -> None:
        """`say`: tells a person what happens; `folder`: where the local Ray's state is, if not where it always is."""
        self.say, self.folder = say, folder
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
            self.ray = self.held.enter_context(hold(self.folder))
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
    with _lock(folder / "users.lock", fcntl.LOCK_SH) as opened:
        os.utime(opened)
        try:
            yield _ensure(folder)
        finally:
            os.utime(opened)


def connect_running(address: str) -> Cluster:
    """A client of a cluster that is to be there already: the local Ray by its address, or another cluster."""
    folder = state_folder()
    head = read_head(folder)
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
            _end_keeper(folder)
            time.sleep(0.05)
        if (head := read_head(folder)) is not None:
            end_head(folder, head)
    return True


def _end_keeper(folder: Path) -> None:
    """End the keeper, not its Ray."""
    import psutil

    pid = (folder / "keeper.lock").read_text()
    try:
        keeper = psutil.Process(int(pid))
        if "pipelines.cluster.local" in keeper.cmdline():
            keeper.kill()
    except (ValueError, psutil.Error):
        return  # it is about to write its pid, or has just ended


def state_folder() -> Path:
    """VITFLOW_RAY_DIR, else a folder of the user's cache for this host and installation.

    Another installation (other packages, other code) needs a Ray of its own, and a home may be shared between hosts.
    """
    if given := os.environ.get("VITFLOW_RAY_DIR"):
        return Path(given).absolute()
    import platformdirs

    identity = "\n".join([_LAYOUT, socket.gethostname(), sys.prefix, str(PROJECT)])
    name = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return platformdirs.user_cache_path("vitflow") / "ray" / name


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
    deadline = time.monotonic() + ENSURE_SECONDS
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
    head = read_head(folder)
    if head is None or not head.alive():
        return None
    if (installed := importlib.metadata.version("ray")) != head.ray_version:
        raise LocalRayError(
            f"the local Ray runs version {head.ray_version}, installed is {installed}: end it with "
            f"`{sys.executable} -m pipelines.cluster.local stop`"
        )
    ray = LocalRay(head.address, head.session_name, folder / "token", folder)
    try:
        return ray if ray.cluster().session_name == head.session_name else None
    except ClusterUnreachable:
        return None


def _start_keeper(folder: Path) -> None:
    """Start a keeper and wait until its head answers. Raises LocalRayError with the reason when it does not."""
    environment = {name: value for name, value in os.environ.items() if name not in PRIVATE}
    environment |= {"PYTHONPATH": python_path(), "VITFLOW_RAY_DIR": str(folder)}
    command = [sys.executable, "-m", "pipelines.cluster.local", "keep"]
    try:
        with (folder / "keeper.log").open("ab") as log:
            said = subprocess.run(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                text=True, check=False, start_new_session=True, timeout=ENSURE_SECONDS,
            ).stdout.strip()  # fmt: skip
    except subprocess.TimeoutExpired:
        said = f"no word of its keeper for {ENSURE_SECONDS:.0f} s"
    if said != "ready":
        reason = said or "its keeper died"
        raise LocalRayError(f"the local Ray did not start: {reason}\n(see also {folder / 'keeper.log'})")


# ------------------------------------------------------------------------------------------------- the keeper


def keep(folder: Path) -> None:
    """The keeper: say "ready" (or why not) on stdout, then watch over the head until it is dead or not needed."""
    if os.fork():  # nobody's child: whoever started it may live longer or shorter
        os._exit(0)
    os.setsid()
    idle_seconds = float(os.environ.get("VITFLOW_RAY_IDLE_SECONDS", "300"))
    with ExitStack() as locks:
        try:
            lock = _lock_soon(folder / "keeper.lock", locks)
        except BlockingIOError:
            _report("ready")  # there is a keeper already
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
    """Tell who started this keeper, who waits for stdout to be closed."""
    _log(text)
    with suppress(BrokenPipeError):  # it is gone; the log has it
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
            _log("the head has died, or its record was removed, so that nobody would find it")
            end_head(folder, head)
            return
        try:
            with _lock(users, fcntl.LOCK_EX | fcntl.LOCK_NB):
                if time.time() - users.stat().st_mtime >= idle_seconds:
                    _log("nobody uses this Ray")
                    end_head(folder, head)
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


def _lock_soon(path: Path, locks: ExitStack) -> int:
    """Hold an flock that others have for a moment, when they look whether anyone holds it. Raises BlockingIOError."""
    deadline = time.monotonic() + 1.0
    while True:
        try:
            return locks.enter_context(_lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.025)


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
            print("usage: python -m pipelines.cluster.local status|stop", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
