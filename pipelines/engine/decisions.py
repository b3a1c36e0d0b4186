"""What the driver does next about a stage: a pure function of the stage's state, one observation of it, and the time.

`decide` returns the next state and the actions that lead to it. The driver adopts the state when the actions are done.
A driver that is interrupted between two actions observes and decides again, so each action may be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from pipelines.cluster.jobs_client import JobState
from pipelines.engine.display import in_words
from pipelines.engine.status import Status
from pipelines.store import UNREACHABLE_SECONDS, Attempt, Manifest

ATTEMPTS = 3  # a command makes at most this many attempts at a stage
BACKOFF_SECONDS = 1.0  # before the second attempt; doubles
ASK_SECONDS = 0.5  # between requests to the cluster about a job
# Between reads of a live job's manifest and sign of life: S3 costs money per request, and the end of a job tells more.
READ_SECONDS = 10.0
MANIFEST_SECONDS = 60.0  # within which the manifest of a job that SUCCEEDED must appear
ALIVE_SECONDS = 60.0  # without a new sign of life, after which a running attempt is lost
# The same before an attempt's first sign of life, while it imports packages, perhaps from a slow network file system.
FIRST_SIGN_SECONDS = 300.0
# After which a job that has not started is given up. No job waits for another: it requests no resources, and the driver
# submits only as many jobs as may run at once. Ray itself waits as long for jobs that request resources.
PENDING_SECONDS = 900.0
PENDING_SHOWN_SECONDS = 10.0  # after which the display shows why a job has not started
GLANCE_SECONDS = 5.0  # the most that a pause between two observations counts; the driver may be suspended
USER_MISTAKE = 2  # the exit code of a stage that is never retried
SOURCE_CHANGED = 3  # the exit code of a stage whose source files no longer match its key, or whose input was removed


class Phase(Enum):
    """How far a stage's newest attempt is."""

    FOUND = "this command has not seen its job alive, so it may have ended before this command began"
    OURS = "this command wrote it, submits it or saw its job alive, so its end is the result of this command"
    RUNNING = "its job is running, and the display shows it"
    MANIFEST_DUE = "its job succeeded, and there is no manifest yet"


@dataclass(frozen=True)
class InFlight:
    """A stage that has begun and has not ended. Times are in seconds of the driver's clock."""

    phase: Phase = Phase.FOUND
    succeeded_at: float = 0.0  # when the job succeeded
    look_at: float = 0.0  # when to observe it next
    read_at: float = 0.0  # when to read the store next while its job is alive
    watched_at: float | None = None  # when its live job was observed last; None if not since an outage
    sign: tuple[str, bytes | None] | None = None  # its job's status and its sign of life at that time
    silent: float = 0.0  # seconds that this command has watched the job without a change of `sign`
    shown_reason: str = ""  # why its job has not started, as the display shows it
    attempts: int = 0  # of this command
    is_waiting: bool = False  # the display shows that the store or the cluster does not answer


@dataclass(frozen=True)
class Observation:
    """The store's and the cluster's answers about a stage.

    If the job is alive, the fields from `session` to `stop_requested` are not read; otherwise `heartbeat` is not.
    """

    attempt: Attempt | None = None  # the newest
    job: JobState | None = None  # its job; None if the cluster does not know it
    session: str = ""  # the cluster's
    log: str = ""
    stop_requested: bool = False
    manifest: Manifest | None = None  # may exist whatever the job's status
    heartbeat: bytes | None = None
    is_new: bool = True  # the heartbeat was read just now, not at an earlier observation
    lost: str = "its cluster is gone"  # why there is no job of an attempt of another session


class Do(Enum):
    """Actions on the newest attempt."""

    WRITE = "write the next attempt; if another driver was faster, use its attempt"
    SUBMIT = "submit the job; the cluster accepts its id once"
    ANNOUNCE = "show that the job is running, and follow its log"
    STOP = "ask the cluster to stop the job"
    PLAN = "plan the stage anew: its source, and with it its key, has changed, or an input was removed"
    COMMIT = "save the log, and end the stage as SUCCEEDED"


@dataclass(frozen=True)
class Show:
    """Show a status to the user."""

    status: Status
    detail: str


class EndAttempt(Show):
    """Save the log, and record the end of an attempt that did not commit."""


class End(Show):
    """Save the log, and end the stage without a manifest."""


Decision = tuple[InFlight, tuple[Do | Show, ...]]


def decide(flight: InFlight, observed: Observation, now: float) -> Decision:
    """Return the stage's next state, and the actions that lead to it, in order."""
    flight = replace(flight, look_at=now + ASK_SECONDS)
    job, attempt = observed.job, observed.attempt
    if observed.manifest is not None:
        return flight, (Do.COMMIT,)
    if attempt is None or (job is None and attempt.cluster_session == observed.session):
        return _start(flight, observed, now)
    if job is None:
        return _retry(flight, observed, now, Status.LOST, observed.lost)
    if not job.ended:
        return _watch(flight, observed, job, now)
    if job.status == Status.SUCCEEDED:
        return _wait_for_manifest(flight, observed, now)
    if job.status == Status.STOPPED:
        return _retry(flight, observed, now, Status.STOPPED, "stopped from outside")
    reason = error_line(observed.log)
    if job.driver_exit_code == SOURCE_CHANGED and flight.phase is not Phase.FOUND:
        return _plan_anew(flight, observed, reason or "the source changed")
    if job.driver_exit_code == USER_MISTAKE and flight.phase is not Phase.FOUND:
        return flight, (End(Status.FAILED, reason or "bad input"),)
    detail = reason or job.message or f"exit code {job.driver_exit_code}"
    return _retry(flight, observed, now, Status.FAILED, detail)


def no_answer(flight: InFlight, reason: str, now: float) -> Decision:
    """Return what to do if the store or the cluster does not answer: show it once, and wait.

    The next observation reads the store, because the job may commit while its cluster does not answer.
    """
    actions = () if flight.is_waiting else (Show(Status.WAITING, f"no answer: {reason}"),)
    waiting = replace(flight, is_waiting=True, look_at=now + UNREACHABLE_SECONDS, watched_at=None, read_at=now)
    return waiting, actions


def _start(flight: InFlight, observed: Observation, now: float) -> Decision:
    if observed.stop_requested:
        return flight, (End(Status.STOPPED, "stopped"),)
    if observed.attempt is None:
        return _next_attempt(flight, now), (Do.WRITE,)
    if flight.phase is Phase.FOUND:  # a step of its own, because the answer to the submission may get lost
        return replace(flight, phase=Phase.OURS, look_at=now), ()
    return flight, (Do.SUBMIT,)


def _watch(flight: InFlight, observed: Observation, job: JobState, now: float) -> Decision:
    """Wait for a live job, but give it up if it does not start or shows no sign of life.

    Ray may call a job RUNNING although its process is dead or suspended. This command judges by changes, and counts
    only the time that it has watched itself: clocks of other machines may be wrong, and no job can show a sign of life
    while the store does not answer.
    """
    sign = job.status, observed.heartbeat
    watched = 0.0 if flight.watched_at is None else min(now - flight.watched_at, GLANCE_SECONDS)
    flight = replace(
        flight,
        phase=Phase.OURS if flight.phase is Phase.FOUND else flight.phase,
        watched_at=now,
        sign=sign,
        silent=flight.silent + watched if sign == flight.sign else 0.0,
        is_waiting=False,
    )
    if job.status == Status.PENDING:
        return _wait_for_start(flight, observed, job, now)
    limit = FIRST_SIGN_SECONDS if observed.heartbeat is None else ALIVE_SECONDS
    if flight.silent > limit and not observed.is_new:  # it may have changed since
        return replace(flight, look_at=now, read_at=now), ()
    if flight.silent > limit:
        return _give_up(flight, observed, now, Status.LOST, f"no sign of life for {limit:.0f} s")
    if job.status == Status.RUNNING and flight.phase is not Phase.RUNNING:
        return replace(flight, phase=Phase.RUNNING), (Do.ANNOUNCE,)
    return flight, ()


def _wait_for_start(flight: InFlight, observed: Observation, job: JobState, now: float) -> Decision:
    if flight.silent > PENDING_SECONDS:
        detail = f"not started within {PENDING_SECONDS / 60:.0f} minutes: {job.message}"
        return _give_up(flight, observed, now, Status.FAILED, detail)
    if flight.silent > PENDING_SHOWN_SECONDS and job.message != flight.shown_reason:
        return replace(flight, shown_reason=job.message), (Show(Status.PENDING, job.message),)
    return flight, ()


def _give_up(flight: InFlight, observed: Observation, now: float, status: Status, detail: str) -> Decision:
    """Stop a live job and make the next attempt, which the job's process sees if the cluster cannot stop it."""
    flight, actions = _retry(flight, observed, now, status, detail)
    return flight, (Do.STOP, *actions)


def _wait_for_manifest(flight: InFlight, observed: Observation, now: float) -> Decision:
    if flight.phase is not Phase.MANIFEST_DUE:
        flight = replace(flight, phase=Phase.MANIFEST_DUE, succeeded_at=now)
    if now - flight.succeeded_at > MANIFEST_SECONDS:
        return _retry(flight, observed, now, Status.FAILED, "its job succeeded without a manifest")
    return flight, ()


def _retry(flight: InFlight, observed: Observation, now: float, status: Status, detail: str) -> Decision:
    """Make the next attempt, unless a stop was requested or this command has used all its attempts."""
    ended = EndAttempt(status, detail)
    if (end := _last(flight, observed, detail)) is not None:
        return flight, (ended, end)
    if flight.phase is Phase.FOUND:  # it ended before this command began
        return _next_attempt(flight, now), (ended, Do.WRITE)
    # the first attempt of this command follows at once
    pause = BACKOFF_SECONDS * 2 ** (flight.attempts - 1) if flight.attempts else 0.0
    return _next_attempt(flight, now + pause), (ended, Show(status, f"{detail}; another attempt"), Do.WRITE)


def _plan_anew(flight: InFlight, observed: Observation, detail: str) -> Decision:
    """Plan the stage anew; this command's attempts at all keys of the stage count together."""
    ended = EndAttempt(Status.FAILED, detail)
    if (end := _last(flight, observed, detail)) is not None:
        return flight, (ended, end)
    anew = InFlight(look_at=flight.look_at, attempts=flight.attempts, is_waiting=flight.is_waiting)
    return anew, (ended, Show(Status.FAILED, f"{detail}; planned anew"), Do.PLAN)


def _last(flight: InFlight, observed: Observation, detail: str) -> End | None:
    """Return the end of a stage with this failed attempt; None if another may follow."""
    if observed.stop_requested:
        return End(Status.STOPPED, "stopped")
    return End(Status.FAILED, detail) if flight.attempts >= ATTEMPTS else None


def _next_attempt(flight: InFlight, look_at: float) -> InFlight:
    return InFlight(Phase.OURS, look_at=look_at, attempts=flight.attempts + 1, is_waiting=flight.is_waiting)


def error_line(log: str) -> str | None:
    """Return the error in a stage's log: the last line that begins with `error: `, otherwise the last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else in_words(lines[-1]) if lines else None
