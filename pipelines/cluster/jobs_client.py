"""A thin client of a Ray cluster's Jobs API: submitting at most once, querying and stopping jobs, reading their logs.

In: a cluster's address and, if it requires one, its token. Out: the states of jobs, and their logs. It uses the
documented REST API through `requests`, because `ray.job_submission` imports all of Ray (0.6 s) and supports one token
per process, from its environment. Ray resolves only addresses that are not URLs.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from pipelines.environment import environment
from vit_model.errors import UserError

if TYPE_CHECKING:
    import requests

DEADLINE_SECONDS = 10.0  # timeout of a request
SUBMIT_SECONDS = 30.0  # timeout of a submission: a cluster's first job waits for the cluster's agent
RECONNECT_SECONDS = 1.0

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class ClusterUnreachable(ConnectionError):  # noqa: N818 (named after the state of the cluster)
    """A cluster does not answer, or not usefully: wait and retry.

    `refused_on_loopback`: the address is on this machine and its port is closed, so that cluster is gone.
    """

    def __init__(self, message: str, refused_on_loopback: bool = False) -> None:
        super().__init__(message)
        self.refused_on_loopback = refused_on_loopback


@dataclass(frozen=True)
class JobState:
    """The state of a job; `status` is PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""

    submission_id: str
    status: str
    message: str
    driver_exit_code: int | None

    @property
    def ended(self) -> bool:
        """Whether the job's status is final. A status that Ray does not document is not final."""
        return self.status in {"SUCCEEDED", "FAILED", "STOPPED"}


@dataclass(frozen=True)
class Cluster:
    """A client of a Ray cluster's Jobs API, which several threads may use; `connect` returns one."""

    address: str
    token: str | None = field(default=None, repr=False)

    @property
    def session_name(self) -> str:
        """The session's name, which changes when the head restarts; requested each time. Raises as `about`."""
        return self.about()["session_name"]

    def about(self) -> dict[str, str]:
        """Return the head's session_name and ray_version.

        Raises:
            ClusterUnreachable: the cluster does not answer.
            UserError: it refuses the token, or is not a Ray cluster.
        """
        response = self._ask("GET", "/api/version")
        if response.status_code >= 500:
            raise ClusterUnreachable(f"{self.address}: HTTP status {response.status_code}")
        if response.status_code != 200 or not response.text.startswith("{"):
            raise self._foreign(response)
        answer = self._json(response)
        return {name: str(answer.get(name, "")) for name in ("session_name", "ray_version")}

    def submit(self, submission_id: str, entrypoint: str, env_vars: dict[str, str], metadata: dict[str, str]) -> None:
        """Submit a job at most once: an id that the cluster already knows is not submitted again.

        Args:
            submission_id: the job's id.
            entrypoint: a shell command.
            env_vars: also for the job's tasks and actors; everyone with access to the cluster can read them.
            metadata: shown with the job.

        Raises:
            ClusterUnreachable: the cluster may not have received it; submit the same id again.
            UserError: the cluster refuses the job.
        """
        request = {
            "submission_id": submission_id,
            "entrypoint": entrypoint,
            "metadata": metadata,
            "runtime_env": {"env_vars": env_vars} if env_vars else {},
        }
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
        """Return the state of a job; None if the cluster does not know it. Raises ClusterUnreachable."""
        response = self._ask("GET", f"/api/jobs/{quote(submission_id, safe='')}")
        return None if self._unknown(response) else _job_state(self._json(response))

    def jobs(self) -> list[JobState]:
        """Return the states of all submitted jobs that the cluster knows. Raises ClusterUnreachable."""
        response = self._ask("GET", "/api/jobs/")
        self._unknown(response)
        return [_job_state(job) for job in self._json(response) if job["type"] == "SUBMISSION"]

    def stop(self, submission_id: str) -> None:
        """Stop a job: SIGTERM, and SIGKILL 3 s later. Do nothing if it has ended or is unknown."""
        self._unknown(self._ask("POST", f"/api/jobs/{quote(submission_id, safe='')}/stop"))

    def logs(self, submission_id: str) -> str:
        """Return a job's log so far; empty if the cluster does not know the job. Raises ClusterUnreachable."""
        response = self._ask("GET", f"/api/jobs/{quote(submission_id, safe='')}/logs")
        if response.status_code == 500 and "UnicodeDecodeError" in response.text:
            return f"(the log cannot be read, it is not UTF-8: {_last_line(response.text)})\n"
        return "" if self._unknown(response) else str(self._json(response)["logs"])

    def follow_logs(self, submission_id: str, write: Callable[[str], None], stop: Event) -> None:
        """Call `write` once for each line of a job's log, without its newline, until the job ends or `stop` is set.

        Run it in its own thread. It fetches the rest of the log when the job ends or `stop` is set; so when the job has
        ended, set `stop` and join the thread. It also returns if the cluster is gone.
        """
        from pipelines.cluster import job_logs  # with aiohttp, which takes as long as planning

        lines, ended = job_logs.Lines(write), partial(self._ended, submission_id)
        url = f"{self.address}/api/jobs/{quote(submission_id, safe='')}/logs/tail"
        while not stop.is_set():
            job_logs.stream(url, self._headers(), not self._on_loopback, lines, stop, ended)
            if ended():
                break
            stop.wait(RECONNECT_SECONDS)
        try:
            lines.position = 0
            lines.add(self.logs(submission_id))
        except ClusterUnreachable:
            pass  # the driver notices it by itself, and a missing log does not fail a run
        lines.end()

    def _ended(self, submission_id: str) -> bool:
        """Whether a job's log is complete: the job has ended, or its cluster is gone."""
        try:
            job = self.job(submission_id)
        except ClusterUnreachable as error:
            return error.refused_on_loopback
        return job is None or job.ended

    @property
    def _on_loopback(self) -> bool:
        return urlsplit(self.address).hostname in LOOPBACK

    def _headers(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def _ask(self, method: str, path: str, deadline: float = DEADLINE_SECONDS, **options: Any) -> requests.Response:
        import requests

        def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
            request.headers.update(self._headers())
            return request

        with requests.Session() as session:
            session.trust_env = not self._on_loopback  # no proxy for this machine
            try:
                # sign through `auth`, because a ~/.netrc would replace a header
                response = session.request(method, self.address + path, timeout=deadline, auth=sign, **options)
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
                f"{self.address} refuses {'access without a token' if self.token is None else 'this token'}; use "
                "--token-file FILE, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, where FILE contains the "
                "cluster's token"
            )
        return response

    def _json(self, response: requests.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise self._foreign(response) from None

    def _foreign(self, response: requests.Response) -> UserError:
        return UserError(
            f"{self.address} answers {response.status_code}, but not like Ray's dashboard; check the address"
        )

    def _unknown(self, response: requests.Response) -> bool:
        """Whether the cluster does not know the job. Raises ClusterUnreachable for other errors."""
        if response.status_code == 404 and "does not exist" in response.text:
            return True
        if response.status_code != 200:
            raise ClusterUnreachable(f"{self.address} answers {response.status_code}: {_last_line(response.text)}")
        return False


def connect(address: str | None = None, token_path: Path | None = None) -> Cluster:
    """Return a client of the cluster at `address`; for a URL (http://HEAD:8265), no request is sent yet.

    Ray resolves any other address ("auto", HOST:PORT of the GCS, ray://...), preferring RAY_API_SERVER_ADDRESS and
    RAY_ADDRESS from the environment. None means these variables, as in a job of the cluster. The token is read from
    `token_path`, else as Ray does: with RAY_AUTH_MODE=token from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or
    ~/.ray/auth_token.

    Raises:
        UserError: there is no token file.
        ClusterUnreachable: Ray cannot resolve the address.
    """
    if address is None:
        address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "auto"
    token = _read_token(token_path)
    if not address.startswith(("http://", "https://")):
        address = _resolve(address, token_path)
    return Cluster(address.rstrip("/"), token)


def python_entrypoint(*arguments: str) -> str:
    """Return a shell command for `Cluster.submit` that runs Python with these arguments on the cluster's head.

    It uses the path of this process's Python if that exists there, otherwise the `python` on that machine's PATH.
    Python does not import modules from the working folder (-P), which may be any folder.
    """
    # `exec`, because Ray runs the entrypoint in a shell: killing the shell must kill the job
    return f'exec "$(command -v {shlex.quote(sys.executable)} || echo python)" -P {shlex.join(arguments)}'


def wait_for_end(cluster: Cluster, submission_ids: set[str], seconds: float) -> None:
    """Return when these jobs have ended, or after `seconds`. Raises ClusterUnreachable."""
    deadline = environment().monotonic() + seconds
    while submission_ids and environment().monotonic() < deadline:
        submission_ids = {job.submission_id for job in cluster.jobs() if not job.ended} & submission_ids
        environment().sleep(0.1)


def _read_token(token_path: Path | None) -> str | None:
    if token_path is None:
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
            return None
        if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
            return token
        token_path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    try:
        return token_path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise UserError(
            f"{token_path}: {problem}; expected the cluster's token. Name the file with --token-file or "
            "RAY_AUTH_TOKEN_PATH"
        ) from None


def _resolve(address: str, token_path: Path | None) -> str:
    """Ask Ray for the URL of a cluster's dashboard. Ray reads the token once, when it is imported."""
    if token_path is not None:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}
    from ray.job_submission import JobSubmissionClient

    try:
        return str(JobSubmissionClient(address).get_address())
    except (ConnectionError, RuntimeError) as error:
        raise ClusterUnreachable(f"no Ray cluster found at {address}: {_last_line(str(error))}") from error


def _job_state(job: dict[str, Any]) -> JobState:
    return JobState(job["submission_id"], job["status"], job["message"] or "", job["driver_exit_code"])


def _refused(error: BaseException) -> bool:
    """Whether a refused connection is among an error's causes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return True
        inner = cause.args[0] if cause.args else None
        # urllib3's `reason` is an exception, ssl's is a word
        candidates = (getattr(inner, "reason", None), inner, cause.__cause__, cause.__context__)
        cause = next((each for each in candidates if isinstance(each, BaseException)), None)
    return False


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "nothing"
