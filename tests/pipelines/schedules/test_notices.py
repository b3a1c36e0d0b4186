"""Who wants notices hears of failures, recoveries and skips, also if somebody is killed, or the receiver is away."""

import hashlib
import hmac
import json
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipelines.environment import using
from pipelines.schedules import serve
from pipelines.schedules.due import promotion
from pipelines.schedules.notices import COMMAND, KEPT, SECRET, URL, NotSent, receiver
from pipelines.schedules.ticks import Position, Promotion
from pipelines.spec import RecipeError
from pipelines.store import Over, commit, create_run, move_alias
from tests.simulation.loop import Killed
from tests.support.memory_store import MemoryStore
from tests.support.records import make_manifest, make_plan
from tests.support.schedules import DyingStore, Scheduled
from tests.support.webhook import webhook

RUN = "some-20261122-120000-0000"


class Receiver:
    """It keeps what it was sent, unless it is away."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.tries, self.is_away = 0, False

    def __call__(self, content: Mapping[str, Any]) -> None:
        self.tries += 1
        if self.is_away:
            raise NotSent("HTTP status 503")
        self.received.append(dict(content))

    def events(self) -> list[tuple[int, str]]:
        return [(content["number"], content["event"]) for content in self.received]


@pytest.fixture
def people() -> Receiver:
    return Receiver()


@pytest.fixture
def often(tmp_path: Path, people: Receiver) -> Scheduled:
    return Scheduled(tmp_path, send=people)


def left(often: Scheduled) -> list[str]:
    return often.store.names("schedules/often/notices")


def test_failures_recoveries_and_the_third_skip_are_told_once(often: Scheduled, people: Receiver) -> None:
    position = Position()
    for minute, status in enumerate(["FAILED", "FAILED", "SUCCEEDED", "SUCCEEDED", "STOPPED", "FAILED"]):
        often.look(minute, position=position)
        often.end(minute, status, "no space left" if status == "FAILED" else "")
        often.look(minute + 0.5, position=position)
    assert people.events() == [(1, "failed"), (2, "failed"), (3, "recovered"), (6, "failed")]
    assert [content["failures_in_a_row"] for content in people.received] == [1, 2, 0, 1]
    assert people.received[0]["text"] == f"often failed: no space left ({often.run(0)})"
    assert len({content["id"] for content in people.received}) == 4
    for minute in range(6, 13):
        often.look(minute, position=position)
    assert people.events()[4:] == [(10, "skipped")]
    often.end(6, "SUCCEEDED")
    often.look(12.5, position=position)
    assert people.events()[5:] == [(7, "recovered")]
    assert left(often) == []


def test_what_a_server_that_died_has_not_sent_another_one_sends(tmp_path: Path, people: Receiver) -> None:
    """The other one runs, and had looked before; no tick follows."""
    often, other = Scheduled(tmp_path, send=people, cron="0 12 * * *"), Position()
    often.look(0, position=Position())
    often.look(0.1, position=other)
    often.end(0, "FAILED", "no space left")
    people.is_away = True
    often.look(0.5, position=Position())
    people.is_away = False
    for minute in (0.6, 0.7, 0.8, 0.9):
        often.look(minute, position=other)
    assert people.events() == []
    often.look(1.6, position=other)
    assert people.events() == [(1, "failed")]
    assert left(often) == []


def test_finding_every_result_after_a_failure_is_a_recovery(often: Scheduled, people: Receiver) -> None:
    often.look(0)
    often.end(0, "FAILED")
    often.make_all()
    often.look(1)
    often.look(2)
    assert people.events() == [(1, "failed"), (2, "recovered")]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", [1, 2])
def test_a_notice_survives_its_writer(often: Scheduled, people: Receiver, write: int, after: bool) -> None:
    """He is killed at the notice or at the end of the run; a minute later, whoever looks sends it."""
    often.look(0)
    often.end(0, "FAILED")
    dying = DyingStore(often.store.root)
    dying.writes_left, dying.after = write, after
    with pytest.raises(Killed):
        often.look(0.2, store=dying)
    often.look(0.3)
    if (write, after) != (1, False):  # there the next one is the writer
        assert people.events() == []
    for minute in (1.4, 2.5):
        often.look(minute)
    assert people.events() == [(1, "failed")]
    assert left(often) == []


def test_what_did_not_happen_is_not_told(often: Scheduled, people: Receiver) -> None:
    """Whoever was to skip a tick for the third time was killed before, and another let it run."""
    for minute in range(3):
        often.look(minute)
    dying = DyingStore(often.store.root)
    dying.writes_left, dying.after = 1, True
    with pytest.raises(Killed):
        often.look(3, store=dying)
    assert left(often) == ["00000004-skipped.json"]
    often.end(0, "SUCCEEDED")
    often.look(3.5)
    often.look(5)
    assert people.received == [] and left(often) == []


def test_a_receiver_that_is_away_is_tried_less_and_less_often_for_a_day(often: Scheduled, people: Receiver) -> None:
    often.clock.monotonic = lambda: often.clock.moment.timestamp()  # type: ignore[method-assign]
    people.is_away, position = True, Position()
    often.look(0, position=position)
    often.end(0, "FAILED")
    (_, line) = often.look(0.1, position=position)
    assert line == "cannot send the notice that tick 1 failed: HTTP status 503; retrying"
    often.write(cron="0 0 1 1 *")
    for seconds in range(10, 3600, 10):
        often.look(0.1 + seconds / 60, position=position)
    assert 8 <= people.tries <= 10
    people.is_away = False
    often.look(200, position=position)
    assert people.events()[:1] == [(1, "failed")]


def test_what_nobody_received_within_a_day_is_dropped(often: Scheduled, people: Receiver) -> None:
    people.is_away = True
    often.look(0)
    often.end(0, "FAILED")
    often.look(0.1)
    lines = often.look(KEPT / timedelta(minutes=1) + 1)
    assert "the notice that tick 1 failed was not received within a day; dropped" in lines
    assert left(often) == []


# ------------------------------------------------------------------------------------------------- receivers


def test_a_webhook_gets_signed_json(monkeypatch: pytest.MonkeyPatch) -> None:
    with webhook([204, 503, 302]) as (url, requests):
        monkeypatch.setenv(URL, url)
        monkeypatch.setenv(SECRET, "hush")
        send = receiver()
        assert send is not None and not {URL, SECRET} & os.environ.keys(), "jobs of the local Ray do not get them"
        send({"event": "failed", "text": "für alle"})
        for status in (503, 302):
            with pytest.raises(NotSent, match=f"^VITFLOW_WEBHOOK_URL: HTTP status {status}$"):
                send({})
    (signature, body), *_ = requests
    assert json.loads(body) == {"event": "failed", "text": "für alle"}
    assert signature == f"sha256={hmac.new(b'hush', body, hashlib.sha256).hexdigest()}"
    assert len(requests) == 3, "a redirect is not followed"
    with pytest.raises(NotSent, match=r"^VITFLOW_WEBHOOK_URL: ConnectionError$") as refused:
        send({})
    assert "secret-path" not in str(refused.value)


def test_a_command_gets_json_on_stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f"import sys; open({str(tmp_path / 'got')!r}, 'w').write(sys.stdin.read()); sys.exit(3)"
    monkeypatch.setenv(COMMAND, f'{sys.executable} -c "{code}"')
    send = receiver()
    assert send is not None
    with pytest.raises(NotSent, match=r"^VITFLOW_NOTICE_COMMAND: exit code 3$"):
        send({"event": "failed"})
    assert json.loads((tmp_path / "got").read_text()) == {"event": "failed"}
    monkeypatch.setenv(COMMAND, "/no/such/program")
    with pytest.raises(NotSent, match="FileNotFoundError"):
        receiver()({})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({URL: "http://example.org/x", SECRET: "s"}, "unusable scheme 'http'"),
        ({URL: "https://example.org/x"}, f"{SECRET} is not set"),
        ({URL: "https://example.org/x", SECRET: "s", COMMAND: "mail"}, "both set"),
    ],
)
def test_what_is_wrong_in_the_environment_is_told_at_the_start(
    variables: dict[str, str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert receiver() is None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=error) as told:
        receiver()
    assert "example.org" not in str(told.value)


# ------------------------------------------------------------------------------------------------- signs of life


def test_a_server_shows_metrics_and_signs_of_life(
    often: Scheduled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often.look(0)
    often.end(0, "FAILED")
    for minute in (1, 2, 3):
        often.look(minute)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("VITFLOW_METRICS_FILE", str(tmp_path / "vitflow.prom"))

        def sleep(seconds: float) -> None:
            assert systemd.recv(100) == b"WATCHDOG=1"
            if looks.pop():
                raise KeyboardInterrupt
            for each in server:
                each.result()

        looks, server = [True, False], []
        pool = often.clock.pool(1)
        with pool as threads:
            submit = threads.submit
            monkeypatch.setattr(threads, "submit", lambda *of: server.append(submit(*of)) or server[-1])
            monkeypatch.setattr(often.clock, "pool", lambda _: pool)
            monkeypatch.setattr(often.clock, "sleep", sleep)
            with using(often.clock):
                serve.serve(often.store, often.reach, lambda _: None)
    samples = [line for line in (tmp_path / "vitflow.prom").read_text().splitlines() if not line.startswith("#")]
    assert samples == [
        f"vitflow_serve_heartbeat_seconds {often.clock.moment.timestamp():.3f}",
        'vitflow_schedule_failures_in_a_row{schedule="often"} 1',
        'vitflow_schedule_skips_in_a_row{schedule="often"} 2',
    ]
    assert [path.name for path in tmp_path.glob(".*")] == []


def with_promotion(run: str) -> MemoryStore:
    """A store with the plan of a run that compares its model with what @production names, and that comparison."""
    store = MemoryStore()
    plan = make_plan(run, "promote", jobs={"promote": "promote"})
    plan["pipeline"]["stages"]["promote"]["against"] = "@production"
    create_run(store, run, plan | {"aliases": {"@production": 0}})
    commit(store, make_manifest("promote", metrics={"verdict": "promoted", "reason": "so it is"}))
    return store


@pytest.mark.parametrize("status", ["SUCCEEDED", "CACHED"])  # CACHED also if the run's first driver was killed
@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ({"verdict": "worse", "by": RUN}, "refused"),
        ({"verdict": "worse", "by": "another"}, None),
        ({"verdict": "same", "by": RUN}, None),
    ],
)
def test_a_run_that_compared_says_what_it_decided(state: dict[str, Any], outcome: str | None, status: str) -> None:
    decided = state | {"alias": "production", "reason": "so it is"}
    stage = {"stage": "promote", "job": "promote", "status": status, "promotion": decided}
    over = {"status": "SUCCEEDED", "time": "2026-11-27T00:00:00+00:00", "stages": [stage]}
    found = promotion(with_promotion(RUN), RUN, Over.model_validate(over))
    assert (found and found.outcome) == outcome
    assert found is None or (found.alias, found.why) == ("production", "so it is")


@pytest.mark.parametrize("by", [RUN, "another"])
def test_a_promotion_is_told_whatever_became_of_the_run_after_it(by: str) -> None:
    """Its driver died before it could say so, and the run was stopped."""
    store = with_promotion(RUN)
    move_alias(store, "production", None, 0, "rule", "k", by)
    told = Promotion(alias="production", outcome="promoted", why="so it is") if by == RUN else None
    assert promotion(store, RUN, None) == told
