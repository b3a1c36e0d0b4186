"""Recurring runs on a real Ray: new images are taken in, ticks survive their servers, drivers that die are followed."""

import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from PIL import Image

from pipelines.engine.history import is_over, runs
from pipelines.engine.runs import run_status
from pipelines.engine.submission import driver_id
from pipelines.recipe.load import parse_pipeline
from pipelines.schedules.due import attend
from pipelines.schedules.schedule import Reach, Schedule, add_schedule, find_schedule, tick_run
from pipelines.store import Store, open_store, read_events
from tests.support.clusters import wait_for
from tests.support.paths import TINY

pytestmark = [pytest.mark.ray, pytest.mark.slow]
MINUTE = timedelta(minutes=1)


def add_image(images: Path, label: str, number: int) -> None:
    (images / label).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), (number % 256, 90 if label == "a" else 10, 40)).save(images / label / f"{number}.png")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes of images."""
    for number in range(20):
        add_image(tmp_path / "images", "a", number)
        add_image(tmp_path / "images", "b", number)
    return tmp_path / "images"


@pytest.fixture
def store(tmp_path: Path, images: Path) -> Store:
    """A store with a schedule for every minute: take the images in, and classify them."""
    opened = open_store(str(tmp_path / "s"))
    stages = {
        "images": {"job": "ingest", "source": {"kind": "folder", "root": str(images)}},
        "pixels": {"job": "baselines", "data": "images", "methods": ["majority"]},
    }
    pipeline = parse_pipeline({"name": "photos", "stages": stages}, "test")
    schedule = Schedule(name="often", pipeline=pipeline, recipe="photos.yaml", cron="* * * * *")
    add_schedule(opened, schedule)
    return opened


def first_tick(store: Store) -> datetime:
    return next(find_schedule(store, "often").next_ticks(datetime.now(UTC)))


def run_of(store: Store, tick: datetime) -> str:
    return tick_run(store, find_schedule(store, "often"), tick)


def outcome(store: Store, run: str) -> dict[str, str]:
    """Stage -> status of a run, when it is over."""
    wait_for(lambda: is_over(store, run))
    return {stage["stage"]: stage["status"] for stage in run_status(store, run)["stages"]}


def drivers(store: Store, run: str) -> list[str]:
    return [event["submission_id"] for event in read_events(store, run) if event["event"] == "driver submitted"]


def test_new_images_are_taken_in_and_what_follows_is_made_and_else_nothing(store: Store, images: Path) -> None:
    def at(tick: datetime) -> tuple[list[str], dict[str, str]]:
        said = list(attend(store, find_schedule(store, "often"), tick, Reach(None), MINUTE))
        run = run_of(store, tick)
        return said, outcome(store, run) if run in runs(store) else {}

    tick = first_tick(store)
    said, stages = at(tick)
    assert f"{driver_id(store, run_of(store, tick), 1)} is running" in said[0]
    assert stages == {"images": "SUCCEEDED", "pixels": "SUCCEEDED"}
    (images / "a" / "0.png").touch()
    said, stages = at(tick + MINUTE)
    assert "nothing new" in said[-1] and stages == {}
    add_image(images, "a", 100)
    said, stages = at(tick + 2 * MINUTE)
    assert stages == {"images": "SUCCEEDED", "pixels": "SUCCEEDED"}
    (images / "b").rename(images.parent / "elsewhere")
    images.rename(images.parent / "gone")
    said, stages = at(tick + 3 * MINUTE)
    assert stages == {"images": "FAILED", "pixels": "SKIPPED"}
    detail = run_status(store, run_of(store, tick + 3 * MINUTE))["stages"][0]["detail"]
    assert "does not exist" in detail, "a run says what it failed of"
    (images.parent / "gone").rename(images)
    (images.parent / "elsewhere").rename(images / "b")
    said, stages = at(tick + 4 * MINUTE)
    assert "nothing new" in said[-1], "the next tick begins anew"


KILLED = """
import os, signal, sys
from datetime import datetime
from pipelines.store import folder
from pipelines.schedules.due import attend, timedelta
from pipelines.schedules.schedule import Reach, find_schedule
from pipelines.store import open_store

uri, tick, after = sys.argv[1:]
create = folder.FolderStore.create

def dying(self, name, data):
    done = create(self, name, data)
    if name.endswith(after):
        os.kill(os.getpid(), signal.SIGKILL)
    return done

folder.FolderStore.create = dying
opened = open_store(uri)
list(attend(opened, find_schedule(opened, "often"), datetime.fromisoformat(tick), Reach(None), timedelta(seconds=60)))
"""


def test_a_server_that_is_killed_between_claim_and_submission(store: Store) -> None:
    """SIGKILL; then two servers at once, long after the tick's grace: one run, one driver, each stage once."""
    tick = first_tick(store)
    killed = subprocess.run([sys.executable, "-c", KILLED, store.uri, tick.isoformat(), "/plan.json"], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    run = run_of(store, tick)
    late = (tick + timedelta(seconds=200)).isoformat()
    command = [sys.executable, "-c", KILLED, store.uri, late, "never"]
    servers = [subprocess.Popen(command) for _ in range(2)]
    assert [server.wait(timeout=120) for server in servers] == [0, 0]
    assert set(outcome(store, run).values()) == {"SUCCEEDED"}
    assert runs(store) == [run]
    assert set(drivers(store, run)) == {driver_id(store, run, 1)}
    attempts = list(Path(store.uri).glob("artifacts/*/*/attempts/*"))
    assert [path.name for path in attempts] == ["1", "1"]


def start_server(store: Store, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pipelines", "schedule", "serve", "--store", store.uri]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def test_sigterm_ends_the_server_in_order_and_changes_elsewhere_reach_it(
    store: Store, tmp_path: Path, vitflow: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    vitflow("schedule", "add", "often", TINY, "--cron", "0 0 1 1 *", "--store", store.uri)
    server = start_server(store, tmp_path / "log")
    said = lambda: (tmp_path / "log").read_text()  # noqa: E731
    wait_for(lambda: "often: 0 0 1 1 * UTC, next" in said(), 40)
    vitflow("schedule", "pause", "often", "--store", store.uri)
    wait_for(lambda: "often: no longer served" in said(), 30)
    server.terminate()
    assert server.wait(timeout=30) == 0
    assert said().endswith("ending; started runs continue\n")
