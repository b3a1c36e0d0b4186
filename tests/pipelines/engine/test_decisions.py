"""What the driver decides, whatever it sees: over every phase, job, exit code and answer of the store."""

from dataclasses import replace
from itertools import product
from random import Random

from pipelines.cluster.jobs_client import JobState
from pipelines.engine.decisions import (
    ALIVE_SECONDS,
    ASK_SECONDS,
    ATTEMPTS,
    FIRST_SIGN_SECONDS,
    GLANCE_SECONDS,
    MANIFEST_SECONDS,
    PENDING_SECONDS,
    Do,
    End,
    EndAttempt,
    InFlight,
    Observation,
    Phase,
    Show,
    decide,
    no_answer,
)
from pipelines.engine.status import Status
from tests.support.records import make_attempt, make_manifest

NOW = 1000.0
HERE, GONE = make_attempt(cluster_session="here"), make_attempt(cluster_session="gone")
JOBS = [
    JobState("j", status, "", code)
    for status, codes in {
        "PENDING": [None],
        "RUNNING": [None],
        "SUSPENDED": [None],
        "STOPPED": [None],
        "SUCCEEDED": [0],
        "FAILED": [1, 2, 3, -9, None],
    }.items()
    for code in codes
]
FLIGHTS = [
    InFlight(phase, since, attempts=attempts, is_waiting=is_waiting)
    for phase, since, attempts, is_waiting in product(
        Phase, (NOW - MANIFEST_SECONDS - 1, NOW - 1), range(ATTEMPTS + 1), (False, True)
    )
]
LOOKS = [
    Observation(attempt, job, "here", log, stop_requested, manifest)
    for attempt, job, log, stop_requested, manifest in product(
        (None, HERE, GONE), (None, *JOBS), ("", "error: bad\n"), (False, True), (None, make_manifest())
    )
    if attempt is not None or job is None
]
EVERY = list(product(FLIGHTS, LOOKS))
LIVE = {"PENDING", "RUNNING", "SUSPENDED"}


def test_a_manifest_beats_every_status() -> None:
    for flight, seen in EVERY:
        _, actions = decide(flight, seen, NOW)
        assert (actions == (Do.COMMIT,)) == (seen.manifest is not None)


def test_a_live_job_is_never_joined_by_another() -> None:
    for flight, seen in EVERY:
        _, actions = decide(flight, seen, NOW)
        if seen.job is not None and seen.job.status in LIVE and seen.manifest is None:
            assert set(actions) <= {Do.ANNOUNCE}
        if seen.job is not None:
            assert Do.SUBMIT not in actions


def test_only_a_job_that_the_attempts_own_cluster_does_not_know_is_submitted() -> None:
    for flight, seen in EVERY:
        after, actions = decide(flight, seen, NOW)
        if Do.SUBMIT in actions:
            assert (seen.attempt, seen.job) == (HERE, None)
            assert after.phase is not Phase.FOUND, "it is ours before it is submitted"


def test_nothing_is_begun_once_a_stop_is_wished() -> None:
    for flight, seen in EVERY:
        _, actions = decide(flight, seen, NOW)
        if seen.stop_requested:
            assert not {Do.WRITE, Do.SUBMIT} & set(actions)


def test_a_command_makes_no_more_than_its_attempts_and_counts_them() -> None:
    for flight, seen in EVERY:
        after, actions = decide(flight, seen, NOW)
        assert after.attempts == flight.attempts + (Do.WRITE in actions)
        if seen.attempt is not None:
            assert after.attempts <= max(flight.attempts, ATTEMPTS)


def test_an_attempt_is_recorded_as_ended_before_the_next_is_written() -> None:
    for flight, seen in EVERY:
        _, actions = decide(flight, seen, NOW)
        if Do.WRITE in actions:
            assert actions[-1] is Do.WRITE, "what follows looks at it anew"
            assert isinstance(actions[0], EndAttempt) == (seen.attempt is not None)


def test_the_users_mistake_ends_a_stage_unless_it_is_old() -> None:
    mistake = Observation(HERE, JobState("j", "FAILED", "", 2), "here", "error: bad\n")
    for flight in FLIGHTS:
        _, actions = decide(flight, mistake, NOW)
        assert (actions == (End(Status.FAILED, "bad"),)) == (flight.phase is not Phase.FOUND)
    assert decide(FLIGHTS[-1], replace(mistake, log=""), NOW)[1] == (End(Status.FAILED, "bad input"),)


def test_the_next_look_is_later_unless_the_state_has_moved_on() -> None:
    for flight, seen in EVERY:
        after, actions = decide(flight, seen, NOW)
        if after.look_at <= NOW:
            assert Do.WRITE in actions or (flight.phase, after.phase) == (Phase.FOUND, Phase.OURS)
        elif Do.WRITE not in actions:
            assert after.look_at == NOW + ASK_SECONDS


def test_a_job_is_given_up_after_its_limit_of_watched_silence_and_not_before() -> None:
    """What counts is the time between two answers in a row, at most 5 s each, since the last new sign of life."""
    random, given_up = Random(0), 0
    for _ in range(300):
        status = random.choice(["PENDING", "RUNNING", "SUSPENDED"])
        limit = PENDING_SECONDS if status == "PENDING" else ALIVE_SECONDS
        flight, now, sign, silent, answered = InFlight(Phase.RUNNING), NOW, 0, 0.0, False
        silence, outage = random.choice([0.5, 0.9, 1.0]), random.choice([0.0, 0.1])
        for _ in range(400):
            pause = random.choice([ASK_SECONDS, 3.0, 3600.0])
            now += pause
            if random.random() < outage:
                flight, answered = no_answer(flight, "gone", now)[0], False
                continue
            is_new = random.random() > silence
            sign += is_new
            silent = 0.0 if is_new else silent + min(pause, GLANCE_SECONDS) * answered
            answered = True
            seen = Observation(HERE, JobState("j", status, "", None), heartbeat=str(sign).encode())
            flight, actions = decide(flight, seen, now)
            assert (Do.STOP in actions) == (silent > limit)
            if Do.STOP in actions:
                assert actions[0] is Do.STOP
                assert actions[-1] is Do.WRITE
                given_up += 1
                break
    assert 50 < given_up < 250


def test_a_job_that_shows_no_sign_is_given_up_in_time() -> None:
    for status, alive, limit, end in (
        ("RUNNING", b"1", ALIVE_SECONDS, EndAttempt(Status.LOST, "no sign of life for 60 s")),
        ("RUNNING", None, FIRST_SIGN_SECONDS, EndAttempt(Status.LOST, "no sign of life for 300 s")),
        ("PENDING", None, PENDING_SECONDS, EndAttempt(Status.FAILED, "not started within 15 minutes: full")),
    ):
        flight, now = InFlight(), NOW
        seen = Observation(HERE, JobState("j", status, "full", None), heartbeat=alive)
        while not (decided := decide(flight, seen, now))[1] or Do.STOP not in decided[1]:
            flight, now = decided[0], decided[0].look_at
        assert limit <= now - NOW <= limit + 2 * ASK_SECONDS
        assert end in decided[1]


def test_why_a_job_is_pending_is_told_once_and_again_when_it_changes() -> None:
    flight, now, told = InFlight(Phase.OURS), NOW, []
    for message in ["no node"] * 30 + ["no image"] * 30 + ["no node"] * 30:
        flight, actions = decide(flight, Observation(HERE, JobState("j", "PENDING", message, None)), now)
        told += actions
        now += 1.0
    assert told == [Show(Status.PENDING, message) for message in ("no node", "no image", "no node")]


def test_silence_is_told_once_and_forgotten_when_the_job_is_seen_live() -> None:
    waiting, told = no_answer(InFlight(Phase.RUNNING), "gone", NOW)
    assert told == (Show(Status.WAITING, "no answer: gone"),)
    assert no_answer(waiting, "still gone", NOW)[1] == ()
    assert waiting.phase is Phase.RUNNING
    assert not decide(waiting, Observation(HERE, JOBS[1]), NOW)[0].is_waiting
    assert decide(waiting, Observation(GONE, session="here"), NOW)[0].is_waiting


def test_a_stage_whose_source_changed_is_planned_anew_within_its_attempts() -> None:
    changed = Observation(HERE, JobState("j", "FAILED", "", 3), "here", "error: it changed\n")
    for attempts in range(ATTEMPTS):
        after, actions = decide(InFlight(Phase.RUNNING, attempts=attempts), changed, NOW)
        assert actions[-1] is Do.PLAN and after.phase is Phase.FOUND and after.attempts == attempts
    _, actions = decide(InFlight(Phase.RUNNING, attempts=ATTEMPTS), changed, NOW)
    assert actions == (EndAttempt(Status.FAILED, "it changed"), End(Status.FAILED, "it changed"))
