"""Signs of life: each is new, a step that does not change ends the attempt, and so does a successor."""

import json
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.store import Layout, create_attempt
from ray_jobs.process import heartbeat
from ray_jobs.process.heartbeat import count_steps, show_heartbeat
from tests.support.clusters import wait_for
from tests.support.memory_store import MemoryStore
from tests.support.network import Network
from tests.support.records import make_attempt

ATTEMPT = make_attempt()
NAME = Layout.heartbeat(ATTEMPT.job, ATTEMPT.key, ATTEMPT.number)


# SystemExit, which ends a thread silently, except under pytest
ends_a_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Record(Network):
    """Keeps every sign of life that is written, and loses requests while `is_out`."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(network=self)
        self.is_out = False
        self.signs: list[dict[str, Any]] = []

    def before(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        if self.is_out:
            raise lost("no answer to test_heartbeat")

    def after(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        if what == "replace":
            assert name == NAME
            self.signs.append(json.loads(self.store.objects[NAME]))

    @property
    def context(self) -> Any:
        return SimpleNamespace(attempt=ATTEMPT, open_store=lambda: self.store)

    def wait(self, more: int) -> None:
        """Until so many more signs of life are written."""
        enough = len(self.signs) + more
        wait_for(lambda: len(self.signs) >= enough, 10)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when the process would end; only the thread that ends it does. A beat takes 2 ms."""
    event = threading.Event()

    def end(code: int) -> None:
        assert code == 1
        event.set()
        raise SystemExit

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.002)
    return event


def test_each_sign_of_life_is_new_and_a_workers_step_is_in_it(ended: threading.Event) -> None:
    record = Record()
    with show_heartbeat(record.context, earlier=100.0):
        record.wait(3)
        with count_steps(record.context) as steps:
            record.wait(3)
            assert record.signs[-1]["step"] is None
            steps.done = 7
            wait_for(lambda: record.signs[-1]["step"] == 7, 10)
        record.wait(3)
        assert record.signs[-1]["step"] == 7, "the stage's process repeats it"
    assert len({json.dumps(sign) for sign in record.signs}) == len(record.signs)
    assert {sign["nonce"] for sign in record.signs} == {ATTEMPT.nonce}
    seconds = [sign["seconds"] for sign in record.signs]
    assert seconds == sorted(seconds) and 100 <= seconds[0] < seconds[-1] < 110
    written = len(record.signs)
    time.sleep(0.02)
    assert len(record.signs) == written, "no signs after the end"
    assert not ended.is_set()


def test_a_worker_alone_shows_its_steps_and_nothing_else(ended: threading.Event) -> None:
    """If the stage's process is suspended, its workers count while they make progress."""
    record = Record()
    with count_steps(record.context) as steps:
        for step in (1, 2, 1):
            steps.done = step
            record.wait(1)
            time.sleep(0.02)
    assert [sign["step"] for sign in record.signs] == [1, 2, 1]


@ends_a_thread
def test_a_step_that_does_not_change_ends_the_process(
    ended: threading.Event, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "STEP_SECONDS", 200 * heartbeat.HEARTBEAT_SECONDS)
    record = Record()
    with show_heartbeat(record.context):
        record.wait(250)
        assert not ended.is_set(), "a stage without steps"
        with count_steps(record.context) as steps:
            for step in range(5):
                steps.done = step
                record.wait(50)
            assert not ended.is_set()
            assert ended.wait(10)
    assert "error: step 4 has lasted for" in capsys.readouterr().err
    assert 200 <= sum(sign["step"] == 4 for sign in record.signs) < 210


@ends_a_thread
def test_a_successor_ends_the_process_and_its_signs(ended: threading.Event, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record()
    with show_heartbeat(record.context):
        record.wait(3)
        create_attempt(record.store, make_attempt(number=2))
        assert ended.wait(10)
        written = len(record.signs)
        time.sleep(0.02)
    assert len(record.signs) == written
    assert "attempt 2 of ingest/k has taken over from attempt 1" in capsys.readouterr().err


def test_signs_go_on_after_an_outage_and_after_a_damaged_one(
    ended: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record()
    with show_heartbeat(record.context):
        record.wait(1)
        record.is_out = True
        time.sleep(0.02)
        record.is_out = False
        record.wait(2)
        record.store.objects[NAME] = b""
        record.wait(2)
    assert capsys.readouterr().err == "warning: cannot write a heartbeat: no answer to test_heartbeat\n"
