"""The recipe `continual` on a folder that grows: a first model, a worse one that is refused, a better one, and back.

VITFLOW_SCHEDULE_MINUTES=10 has two servers run it every minute for so long, and kills them: `make test-schedule`.
"""

import hashlib
import hmac
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise, repeat
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from pipelines.cluster.local import hold
from pipelines.engine.history import is_over, runs
from pipelines.engine.runs import run_status
from pipelines.schedules.notices import SECRET, URL
from pipelines.store import Store, alias_history, all_manifests, open_store, read_events
from tests.conftest import Vitflow
from tests.support.clusters import wait_for
from tests.support.growing import add, small
from tests.support.webhook import webhook

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]
MINUTES = int(os.environ.get("VITFLOW_SCHEDULE_MINUTES", "0"))


def moves(store: Store) -> list[tuple[int, str]]:
    return [(record.number, record.why) for record in alias_history(store, "production")]


def test_each_run_decides_whether_its_model_replaces_the_one_in_use(vitflow_local: Vitflow, tmp_path: Path) -> None:
    photos, store = tmp_path / "photos", tmp_path / "s"
    add(photos, 60)
    changes = small(photos, tmp_path / "frozen")

    def run(*more: str) -> str:
        return vitflow_local("run", "continual", "--store", store, *changes, *more, COLUMNS="300").stdout

    opened, longer = open_store(str(store)), ("--set", "train.steps=120")
    said = run()
    assert "@production: promoted: the accuracy is " in said and "Nothing to compare" not in said
    assert moves(opened) == [(1, "rule")]
    first = alias_history(opened, "production")[-1]
    add(photos, 200, wrong=True)
    said = run()
    assert "@production: refused, worse: " in said and "more than 2 points are lost" in said
    assert moves(opened) == [(1, "rule")]
    for path in list(photos.rglob("*.png")):
        path.unlink()
    add(photos, 200)
    said = run(*longer)
    assert "a loss of 2 points is ruled out" in said
    assert moves(opened) == [(1, "rule"), (2, "rule")]
    *_, newest = all_manifests(opened, "pretrain")
    assert [each.key for each in newest.inputs["init_from"]] == [first.target and first.target.key], "not the refused"
    vitflow_local("alias", "rollback", "production", "--store", store)
    run(*longer)
    assert moves(opened) == [(1, "rule"), (2, "rule"), (3, "rollback")], "the comparison is cached"
    listed = json.loads(vitflow_local("list", "--kind", "models", "--json", "--store", store).stdout)
    assert [row["alias"] for row in listed] == ["@production", None, None]
    compared = vitflow_local("report", "compare", "continual/promote", "@production", "--store", store, check=2)
    assert "no measurements" in compared.stderr


class Server:
    """`vitflow schedule serve`, which is killed now and then, and started again."""

    def __init__(self, store: Store, log: Path) -> None:
        self.command = [sys.executable, "-m", "pipelines", "schedule", "serve", "--store", store.uri]
        self.log = log
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT)

    def restart(self) -> None:
        self.process.kill()
        self.process.wait()
        self.start()

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(timeout=60) == 0


class Writer:
    """It adds images all the time, from some moment on with the wrong labels; then it takes those away again."""

    def __init__(self, photos: Path) -> None:
        self.photos, self.is_wrong, self.is_over = photos, False, Event()
        add(photos, 60)
        self.thread = Thread(target=self._write)
        self.thread.start()

    def _write(self) -> None:
        while not self.is_over.wait(2):
            add(self.photos, 20 if self.is_wrong else 2, wrong=self.is_wrong)

    def correct(self) -> None:
        self.is_wrong = False
        time.sleep(5)
        for path in list(self.photos.rglob("*.png")):
            path.unlink()
        add(self.photos, 200)

    def end(self) -> None:
        self.is_over.set()
        self.thread.join()


@pytest.mark.timeout(60 * MINUTES + 600)
@pytest.mark.skipif(MINUTES < 5, reason="VITFLOW_SCHEDULE_MINUTES is not set: make test-schedule")
def test_two_servers_retrain_and_decide_over_a_folder_that_is_never_at_rest(
    vitflow: Vitflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good labels until a model is promoted, wrong ones until one is refused, then good ones: no tick fails.

    One of the servers is killed every 40 to 80 seconds. It takes longer than MINUTES if none is promoted again by then.
    """
    chance, store = random.Random(0), open_store(str(tmp_path / "s"))
    writer = Writer(tmp_path / "photos")
    changes = small(writer.photos, tmp_path / "frozen")
    vitflow("schedule", "add", "often", "continual", "--cron", "* * * * *", *changes, "--store", store.uri)
    with webhook(repeat(204)) as (url, requests), hold():
        monkeypatch.setenv(URL, url)
        monkeypatch.setenv(SECRET, "hush")
        servers = [Server(store, tmp_path / "log1"), Server(store, tmp_path / "log2")]

        def heard() -> list[dict[str, Any]]:
            return [json.loads(body) for _, body in requests]

        began = time.monotonic()
        while time.monotonic() < began + 60 * MINUTES or "refused promoted" not in decided(heard()):
            time.sleep(chance.uniform(40, 80))
            chance.choice(servers).restart()
            if writer.is_wrong and "refused" in decided(heard()):
                wait_for(lambda: all(is_over(store, run) for run in runs(store)))
                writer.correct()
            elif decided(heard()) and "refused" not in decided(heard()):
                writer.is_wrong = True
        ends = Path(store.uri) / "schedules" / "often" / "ends"
        wait_for(lambda: len(list(ends.glob("*.json"))) == len(runs(store)), 600)  # between two runs
        for server in servers:
            server.end()
        writer.end()
    told = {notice["id"]: notice for notice in heard()}.values()
    print(*((tmp_path / name).read_text() for name in ("log1", "log2")), *told, sep="\n")
    for signature, body in requests:
        assert signature == f"sha256={hmac.new(b'hush', body, hashlib.sha256).hexdigest()}"
    check_ticks(store)
    assert decided(told).startswith("promoted") and "refused promoted" in decided(told)
    assert not [notice for notice in told if notice["event"] == "failed"]
    assert len(moves(store)) == decided(told).split().count("promoted"), "each decision was told"


def decided(notices: Iterable[dict[str, Any]]) -> str:
    """What was decided, in order."""
    return " ".join(notice["event"] for notice in notices if notice["event"] in {"promoted", "refused"})


def check_ticks(store: Store) -> None:
    """Each tick was decided once, and each run succeeded, with one driver, and without another at the same time."""
    folder = Path(store.uri) / "schedules" / "often"
    decided = [json.loads(path.read_text()) for path in sorted((folder / "ticks").glob("*.json"))]
    ends = [json.loads(path.read_text()) for path in sorted((folder / "ends").glob("*.json"))]
    assert len({record["tick"] for record in decided}) == len(decided)
    fired = [record["run"] for record in decided if record["decision"] == "run"]
    print(f"{len(decided)} ticks: {Counter(record['decision'] for record in decided)}")
    assert runs(store) == fired
    assert {end["status"] for end in ends} == {"SUCCEEDED"}
    for run in fired:
        assert run_status(store, run)["status"] == "SUCCEEDED"
        submitted = {
            event["submission_id"] for event in read_events(store, run) if event["event"] == "driver submitted"
        }
        assert len(submitted) <= 1, "no tick had a second driver"
    for before, after in pairwise(fired):
        assert read_events(store, before)[-1]["time"] <= read_events(store, after)[0]["time"], "no two at once"
