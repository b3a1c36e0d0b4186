"""What the driver does next about a stage: a pure function of the stage's state, of one look at it, and of the time.

`decide` returns the next state and the actions that lead to it. The state counts once its actions are done: a driver
that is cut off between two actions looks and decides again, so each action may be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from pipelines.cluster.jobs_client import JobState
from pipelines.engine.status import Status
from pipelines.store import UNREACHABLE_SECONDS, Attempt, Manifest

ATTEMPTS = 3  # a command makes at most this many attempts at a stage
BACKOFF_SECONDS = 1.0  # before the second attempt; doubles
ASK_SECONDS = 0.5  # between questions to the store and to the cluster, whom answering costs time
MANIFEST_SECONDS = 60.0  # a job that SUCCEEDED shows its manifest within this time
USER_MISTAKE = 2  # the exit code of a stage that is never retried


class Phase(Enum):
    """How far a stage's newest attempt is."""

    FOUND = "this command has not seen its job live: how it ended may be old news"
    OURS = "this command wrote it, submits it or saw its job live: how it ends is the answer to this command"
    RUNNING = "its job runs, which was announced"
    MANIFEST_DUE = "its job succeeded, and the manifest is not there yet"


@dataclass(frozen=True)
class InFlight:
    """A stage that has begun and has not ended. Times are in seconds of the driver's clock."""

    phase: Phase = Phase.FOUND
    since: float = 0.0  # the job succeeded
    look_at: float = 0.0  # no look before this time
    made: int = 0  # attempts that this command made
    is_waiting: bool = False  # a person was told that nothing answers


@dataclass(frozen=True)
class Seen:
    """One look at a stage. What follows the job is asked if the job is not live."""

    attempt: Attempt | None = None  # the newest
    job: JobState | None = None  # its job; None if the cluster does not know it
    session: str = ""  # the cluster's
    log: str = ""
    stop_wished: bool = False
    manifest: Manifest | None = None  # whatever the job's status


class Do(Enum):
    """Actions on the newest attempt."""

    WRITE = "write the next attempt; if another driver was faster, its attempt is the one"
    SUBMIT = "submit the job; the cluster takes its id once"
    ANNOUNCE = "tell that the job runs, and follow its log"
    COMMIT = "save the log, and end the stage as SUCCEEDED"


@dataclass(frozen=True)
class Show:
    """Tell a person."""

    status: Status
    detail: str


class EndAttempt(Show):
    """Save the log, and record how an attempt ended that did not commit."""


class End(Show):
    """Save the log, and end the stage without a manifest."""


Decision = tuple[InFlight, tuple[Do | Show, ...]]


def decide(flight: InFlight, seen: Seen, now: float) -> Decision:
    """Return the stage's next state, and the actions that lead to it in their order."""
    flight = replace(flight, look_at=now + ASK_SECONDS)
    job, attempt = seen.job, seen.attempt
    if seen.manifest is not None:
        return flight, (Do.COMMIT,)
    if attempt is None or (job is None and attempt.cluster_session == seen.session):
        return _start(flight, seen, now)
    if job is None:
        return _retry(flight, seen, now, Status.LOST, "its cluster is gone")
    if not job.ended:
        return _watch(flight, job)
    if job.status == Status.SUCCEEDED:
        return _wait_for_manifest(flight, seen, now)
    if job.status == Status.STOPPED:
        return _retry(flight, seen, now, Status.STOPPED, "stopped from outside")
    reason = error_line(seen.log)
    if job.driver_exit_code == USER_MISTAKE and flight.phase is not Phase.FOUND:
        return flight, (End(Status.FAILED, reason or "bad input"),)
    detail = reason or job.message or f"exit code {job.driver_exit_code}"
    return _retry(flight, seen, now, Status.FAILED, detail)


def no_answer(flight: InFlight, reason: str, now: float) -> Decision:
    """Return what follows a look, or an action, that the store or the cluster did not answer: say so once, and wait."""
    told = () if flight.is_waiting else (Show(Status.WAITING, f"no answer: {reason}"),)
    return replace(flight, is_waiting=True, look_at=now + UNREACHABLE_SECONDS), told


def _start(flight: InFlight, seen: Seen, now: float) -> Decision:
    if seen.stop_wished:
        return flight, (End(Status.STOPPED, "stopped"),)
    if seen.attempt is None:
        return _next_attempt(flight, now), (Do.WRITE,)
    if flight.phase is Phase.FOUND:  # a state of its own: the answer to the submission may get lost
        return replace(flight, phase=Phase.OURS, look_at=now), ()
    return flight, (Do.SUBMIT,)


def _watch(flight: InFlight, job: JobState) -> Decision:
    flight = replace(flight, is_waiting=False)
    if job.status == Status.RUNNING and flight.phase is not Phase.RUNNING:
        return replace(flight, phase=Phase.RUNNING), (Do.ANNOUNCE,)
    return replace(flight, phase=Phase.OURS) if flight.phase is Phase.FOUND else flight, ()


def _wait_for_manifest(flight: InFlight, seen: Seen, now: float) -> Decision:
    if flight.phase is not Phase.MANIFEST_DUE:
        flight = replace(flight, phase=Phase.MANIFEST_DUE, since=now)
    if now - flight.since > MANIFEST_SECONDS:
        return _retry(flight, seen, now, Status.FAILED, "it ended well without a manifest")
    return flight, ()


def _retry(flight: InFlight, seen: Seen, now: float, status: Status, detail: str) -> Decision:
    """Make the next attempt, unless the run is to stop or this command has made its share of attempts."""
    ended = EndAttempt(status, detail)
    if seen.stop_wished:
        return flight, (ended, End(Status.STOPPED, "stopped"))
    if flight.made >= ATTEMPTS:
        return flight, (ended, End(Status.FAILED, detail))
    if flight.made == 0:  # what another command left needs neither a word nor a pause
        return _next_attempt(flight, now), (ended, Do.WRITE)
    pause = BACKOFF_SECONDS * 2 ** (flight.made - 1)
    return _next_attempt(flight, now + pause), (ended, Show(status, f"{detail}; another attempt"), Do.WRITE)


def _next_attempt(flight: InFlight, look_at: float) -> InFlight:
    return InFlight(Phase.OURS, look_at=look_at, made=flight.made + 1, is_waiting=flight.is_waiting)


def error_line(log: str) -> str | None:
    """Return what a stage said it died of: the last line that begins with `error: `, else the last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else lines[-1] if lines else None
