"""A thin client of a Ray cluster's Jobs API: submit at most once, ask, stop, read and follow logs.

In: a cluster's address and, where it asks for one, its token. Out: the states of jobs, and their logs. The documented
REST API is used through `requests`: with `ray.job_submission` a driver would import all of Ray (0.6 s) and could carry
one token a process, read from its environment. Only an address that is not a URL is left to Ray to resolve.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlsplit

from vit_model.errors import UserError

if TYPE_CHECKING:
    import aiohttp
    import requests

DEADLINE_SECONDS = 10.0  # how long a call may go without an answer
SUBMIT_SECONDS = 30.0  # the first job of a cluster waits for the cluster's agent
RECONNECT_SECONDS = 1.0
ASK_SECONDS = 1.0  # how often, while nothing is said, whether the job has ended
STOP_SECONDS = 0.2  # how soon a wish to stop following a log is seen

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class ClusterUnreachable(ConnectionError):  # noqa: N818 (named for what it tells)
    """Nothing answers, or nothing that can: wait and ask again.

    `refused_on_loopback`: the port of an address of this machine is closed, so that cluster is gone.
    """

    def __init__(self, message: str, refused_on_loopback: bool = False) -> None:
        super().__init__(message)
        self.refused_on_loopback = refused_on_loopback


@dataclass(frozen=True)
class JobState:
    """What a cluster says of a job; `status` is PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""

    submission_id: str
    status: str
    message: str
    driver_exit_code: int | None

    @property
    def ended(self) -> bool:
        """Whether the job will not change any more. A status that Ray does not document is not an end."""
        return self.status in {"SUCCEEDED", "FAILED", "STOPPED"}


class JobServer(Protocol):
    """What a driver asks of a cluster; `Cluster` is the real one and says what each method does."""

    @property
    def address(self) -> str: ...
    @property
    def session_name(self) -> str: ...
    def submit(
        self, submission_id: str, entrypoint: str, env_vars: dict[str, str], metadata: dict[str, str]
    ) -> None: ...
    def job(self, submission_id: str) -> JobState | None: ...
    def stop(self, submission_id: str) -> None: ...
    def logs(self, submission_id: str) -> str: ...
    def follow_logs(
        self, submission_id: str, write: Callable[[str], None], stop: threading.Event
    ) -> None: ...


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster's Jobs API; safe to use from several threads. Made by `connect`."""

    address: str
    token: str | None = field(default=None, repr=False)

    @property
    def session_name(self) -> str:
        """The name that tells a restarted head from the old one, asked anew each time. Raises as `about`."""
        return self.about()["session_name"]

    def about(self) -> dict[str, str]:
        """What the head says of itself: session_name, ray_version, and date, its clock as HTTP spells it.

        Raises ClusterUnreachable, and UserError where the token is refused or no Ray answers.
        """
        response = self._ask("GET", "/api/version")
        if response.status_code >= 500:
            raise ClusterUnreachable(f"{self.address} answers {response.status_code}")
        if response.status_code != 200 or not response.text.startswith("{"):
            raise self._foreign(response)
        said = self._json(response)
        told = {name: str(said.get(name, "")) for name in ("session_name", "ray_version")}
        return told | {"date": response.headers.get("Date", "")}

    def submit(
        self, submission_id: str, entrypoint: str, env_vars: dict[str, str], metadata: dict[str, str]
    ) -> None:
        """Submit a job at most once: an id that the cluster already knows is not submitted again.

        `entrypoint`: a shell command. `env_vars` also reach the job's tasks and actors, and everyone who may read
        the cluster: no secrets. Raises ClusterUnreachable when the cluster may not have got it (submit the same id
        again), UserError when it refuses such a job.
        """
        request = {"submission_id": submission_id, "entrypoint": entrypoint, "metadata": metadata,
                   "runtime_env": {"env_vars": env_vars} if env_vars else {}}  # fmt: skip
        try:
            response = self._ask("POST", "/api/jobs/", SUBMIT_SECONDS, json=request)
            if response.status_code == 200:
                return
            reason = _last_line(response.text)
            if response.status_code == 400:
                raise UserError(f"{self.address} refuses the job {submission_id}: {reason}")
        except ClusterUnreachable as error:
            reason = str(error)
        if self.job(submission_id) is None:
            raise ClusterUnreachable(f"{submission_id} could not be submitted to {self.address}: {reason}")

    def job(self, submission_id: str) -> JobState | None:
        """The state of a job; None when the cluster does not know it. Raises ClusterUnreachable."""
        response = self._ask("GET", f"/api/jobs/{quote(submission_id, safe='')}")
        return None if self._unknown(response) else _job_state(self._json(response))

    def jobs(self) -> list[JobState]:
        """Every submitted job that the cluster remembers. Raises ClusterUnreachable."""
        response = self._ask("GET", "/api/jobs/")
        self._unknown(response)
        return [_job_state(job) for job in self._json(response) if job["type"] == "SUBMISSION"]

    def stop(self, submission_id: str) -> None:
        """Ask a job to end: SIGTERM, and SIGKILL 3 s later. One that has ended or is unknown is left as it is."""
        self._unknown(self._ask("POST", f"/api/jobs/{quote(submission_id, safe='')}/stop"))

    def logs(self, submission_id: str) -> str:
        """Everything that a job has said; empty when the cluster does not know it. Raises ClusterUnreachable."""
        response = self._ask("GET", f"/api/jobs/{quote(submission_id, safe='')}/logs")
        if response.status_code == 500 and "UnicodeDecodeError" in response.text:
            return f"(the log cannot be read, it is not UTF-8: {_last_line(response.text)})\n"
        return "" if self._unknown(response) else str(self._json(response)["logs"])

    def follow_logs(self, submission_id: str, write: Callable[[str], None], stop: threading.Event) -> None:
        """Call `write` with each line (without its newline) of a job's log, once, until the job ends or `stop` is set.

        For a thread of its own. At the end, or at `stop`, what is still missing is fetched, so set `stop` when the job
        is seen to have ended, then join the thread. A cluster that is gone ends it too.
        """
        import asyncio

        lines = _Lines(write)
        while not stop.is_set():
            asyncio.run(self._tail(submission_id, lines, stop))
            if self._ended(submission_id):
                break
            stop.wait(RECONNECT_SECONDS)
        try:
            lines.position = 0
            lines.add(self.logs(submission_id))
        except ClusterUnreachable:
            pass  # whoever follows the job itself learns of it; a log is not what a run fails of
        lines.end()

    def _ended(self, submission_id: str) -> bool:
        """Whether nothing more will come of a job: it has ended, or its cluster is gone."""
        try:
            job = self.job(submission_id)
        except ClusterUnreachable as error:
            return error.refused_on_loopback
        return job is None or job.ended

    async def _tail(self, submission_id: str, lines: _Lines, stop: threading.Event) -> None:
        """Stream a log from its beginning; returns when the stream ends, breaks, or `stop` is set."""
        import aiohttp

        url = f"{self.address}/api/jobs/{quote(submission_id, safe='')}/logs/tail"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=DEADLINE_SECONDS)
        lines.position = 0
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=not self._on_loopback) as session,
                session.ws_connect(url, headers=self._headers(), max_msg_size=0, heartbeat=30.0) as socket,
            ):
                await _receive(socket, lines, stop, lambda: self._ended(submission_id))
        except (aiohttp.ClientError, OSError, TimeoutError):
            return

    @property
    def _on_loopback(self) -> bool:
        return urlsplit(self.address).hostname in LOOPBACK

    def _headers(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def _ask(
        self, method: str, path: str, deadline: float = DEADLINE_SECONDS, **given: Any
    ) -> requests.Response:
        import requests

        def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
            request.headers.update(self._headers())
            return request

        with requests.Session() as session:
            session.trust_env = not self._on_loopback  # no proxy stands between a machine and itself
            try:
                # signed through `auth`, since a ~/.netrc would replace a header
                response = session.request(method, self.address + path, timeout=deadline, auth=sign, **given)
            except requests.exceptions.SSLError as error:
                raise ClusterUnreachable(
                    f"{self.address}: no TLS connection ({_last_line(str(error))}). Ray's dashboard speaks plain HTTP: "
                    "use http://, unless it is behind a TLS proxy"
                ) from error
            except requests.RequestException as error:
                refused = self._on_loopback and _refused(error)
                reason = "connection refused" if refused else _last_line(str(error))
                raise ClusterUnreachable(f"{self.address}: {reason}", refused) from error
        if response.status_code in {401, 403}:
            raise UserError(
                f"{self.address} refuses {'a caller without a token' if self.token is None else 'this token'}: give "
                "the cluster's by RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=<a file that has it>"
            )
        return response

    def _json(self, response: requests.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise self._foreign(response) from None

    def _foreign(self, response: requests.Response) -> UserError:
        return UserError(f"{self.address} answers {response.status_code}, but not as Ray does")

    def _unknown(self, response: requests.Response) -> bool:
        """True when the cluster does not know the job; raises what is neither that nor an answer."""
        if response.status_code == 404 and "does not exist" in response.text:
            return True
        if response.status_code != 200:
            raise ClusterUnreachable(
                f"{self.address} answers {response.status_code}: {_last_line(response.text)}"
            )
        return False


class _Lines:
    """Turns a stream, which begins anew with each connection, into lines that are written once."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.position = 0  # characters received by the present connection
        self.taken = 0  # characters that were new, by all of them
        self.rest = ""

    def add(self, text: str) -> None:
        """Take what comes next in the stream."""
        new = text[max(0, self.taken - self.position) :]
        self.position += len(text)
        self.taken = max(self.taken, self.position)
        *whole, self.rest = (self.rest + new).split("\n")
        for line in whole:
            self.write(line)

    def end(self) -> None:
        """Write a last line that has no newline."""
        if self.rest:
            self.write(self.rest)


async def _receive(
    socket: aiohttp.ClientWebSocketResponse, lines: _Lines, stop: threading.Event, ended: Callable[[], bool]
) -> None:
    """Take what comes until the stream ends or `stop` is set. Ray closes the stream of an ended job 5 s late: ask."""
    import asyncio

    import aiohttp

    receiving = asyncio.ensure_future(socket.receive())
    asked = time.monotonic()
    while not stop.is_set():
        # not wait_for: cancelling a receive loses what has just come
        done, _ = await asyncio.wait({receiving}, timeout=STOP_SECONDS)
        if done:
            message = receiving.result()
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            lines.add(message.data)
            receiving = asyncio.ensure_future(socket.receive())
        elif time.monotonic() - asked > ASK_SECONDS:
            if ended():
                break
            asked = time.monotonic()
    receiving.cancel()
    await asyncio.wait({receiving})


def connect(address: str | None = None, token_path: Path | None = None) -> Cluster:
    """A client of the cluster at `address`; nothing is asked of it yet when that is a URL (http://HEAD:8265).

    Any other address ("auto", HOST:PORT of the GCS, ray://...) is resolved by Ray, which prefers RAY_API_SERVER_ADDRESS
    and RAY_ADDRESS of the environment. None means these, as in a job of the cluster. The token is read from
    `token_path`, else as Ray does: with RAY_AUTH_MODE=token from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or
    ~/.ray/auth_token. Raises UserError for a missing token file and ClusterUnreachable when Ray resolves nothing.
    """
    if address is None:
        address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "auto"
    token = _read_token(token_path)
    if not address.startswith(("http://", "https://")):
        address = _resolve(address, token_path)
    return Cluster(address.rstrip("/"), token)


def python_entrypoint(*arguments: str) -> str:
    """A shell command for `Cluster.submit` that runs Python with these arguments on the cluster's head.

    By this process's Python where that lies there too, never by PATH; else, on another machine, by the `python` there.
    """
    # `exec`: the entrypoint is run through a shell, whose death would otherwise not be the job's
    return f'exec "$(command -v {shlex.quote(sys.executable)} || echo python)" {shlex.join(arguments)}'


def wait_for_end(cluster: Cluster, submission_ids: set[str], seconds: float) -> None:
    """Return when these jobs have ended, or after `seconds`. Raises ClusterUnreachable."""
    deadline = time.monotonic() + seconds
    while submission_ids and time.monotonic() < deadline:
        submission_ids = {job.submission_id for job in cluster.jobs() if not job.ended} & submission_ids
        time.sleep(0.1)


def _read_token(token_path: Path | None) -> str | None:
    if token_path is None:
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
            return None
        if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
            return token
        token_path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    try:
        return token_path.read_text().strip()
    except FileNotFoundError:
        raise UserError(
            f"the cluster's token is to be read from {token_path}, but there is no such file; "
            "RAY_AUTH_TOKEN_PATH names the right one"
        ) from None


def _resolve(address: str, token_path: Path | None) -> str:
    """Ask Ray for the URL of a cluster's dashboard. Ray looks for a token once, at its import."""
    if token_path is not None:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}
    from ray.job_submission import JobSubmissionClient

    try:
        return str(JobSubmissionClient(address).get_address())
    except (ConnectionError, RuntimeError) as error:
        raise ClusterUnreachable(f"no Ray cluster is found at {address}: {_last_line(str(error))}") from error


def _job_state(job: dict[str, Any]) -> JobState:
    return JobState(job["submission_id"], job["status"], job["message"] or "", job["driver_exit_code"])


def _refused(error: BaseException) -> bool:
    """Whether a refused connection is among an error's causes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return True
        inner = cause.args[0] if cause.args else None
        # urllib3's `reason` is an exception, that of ssl's errors a word
        found = (getattr(inner, "reason", None), inner, cause.__cause__, cause.__context__)
        cause = next((each for each in found if isinstance(each, BaseException)), None)
    return False


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "nothing"
