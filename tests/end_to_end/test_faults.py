"""SIGKILL at any moment, then the same command: it goes on, nothing committed is done twice, nothing half is visible.

VITFLOW_FAULT_ROUNDS (default 1) and VITFLOW_FAULT_SEED make the random test longer: `make test-faults`.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from pipelines.cluster.local import LocalConnection
from pipelines.engine import decisions
from pipelines.engine.display import RunDisplay
from pipelines.engine.driver import Driver
from pipelines.engine.runs import start_run
from pipelines.recipe.load import parse_pipeline
from pipelines.store import Layout, open_store, read_attempt, read_manifest
from tests.support.clusters import wait_for
from tests.support.local_runs import a_local_ray, finish, kill, matching, saved_steps, signs_of_life, start
from tests.support.stores import files_of, manifests, repeated

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def own_ray() -> Iterator[dict[str, str]]:
    """The environment of a local Ray of the test's own."""
    with a_local_ray() as environment:
        yield environment


VICTIMS: dict[str, Callable[[dict[str, str]], list[psutil.Process]]] = {
    "driver": lambda environment: matching(environment, "pipelines", "run", "--store"),
    "stage": lambda environment: matching(environment, "-m ray_jobs."),
    "worker": lambda environment: matching(environment, "ray::")[:1],
    "keeper": lambda environment: matching(environment, "pipelines.cluster.local", "keep"),
    "head": lambda environment: matching(environment, "gcs_server"),
}


def check_whole(store: Path, reference: Path) -> None:
    """Everything is there, undamaged, and equal to what an undisturbed run makes."""
    ours, theirs = manifests(store), manifests(reference)
    assert set(ours) == {"digits", "pretrain", "probe"}
    for stage, manifest in ours.items():
        folder = files_of(store, manifest)
        for file in manifest["files"]:
            assert sha256((folder / file["path"]).read_bytes()).hexdigest() == file["sha256"]
        assert repeated(manifest["files"]) == repeated(theirs[stage]["files"]), stage


def test_a_run_that_is_interrupted_and_then_killed_goes_on(
    own_ray: dict[str, str], tiny_store: Path, tmp_path: Path
) -> None:
    store = tmp_path / "s"
    interrupted = start(store, own_ray)
    wait_for(lambda: matching(own_ray, "-m ray_jobs.pretrain"))
    interrupted.send_signal(signal.SIGINT)
    out, _ = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130, out
    assert "To continue: vitflow run" in out
    wait_for(lambda: not matching(own_ray, "-m ray_jobs.pretrain"), 20)
    assert set(manifests(store)) == {"digits"}

    killed = start(store, own_ray)
    wait_for(lambda: matching(own_ray, "-m ray_jobs.pretrain"))
    killed.kill()
    killed.communicate()
    assert "continuing" in finish(start(store, own_ray))
    attempts = Counter(path.parents[2].name for path in store.glob("artifacts/*/*/attempts/*"))
    assert attempts == {"ingest": 1, "pretrain": 2, "evaluate": 1}, "the killed driver's job was not repeated"
    assert len(list((store / "runs").iterdir())) == 2, "the third command continued the second's run"
    check_whole(store, tiny_store)


def suspended(stage: psutil.Process, workers: list[psutil.Process]) -> psutil.Process:
    """Suspend a stage's process with its workers and its supervisor, which is returned; as with its machine."""
    supervisor = stage.parent()
    assert supervisor is not None
    assert "JobSupervisor" in " ".join(supervisor.cmdline())
    for process in (supervisor, *workers, stage):
        process.suspend()
    return supervisor


def is_over(process: psutil.Process) -> bool:
    """Gone, or not yet reaped because its parent is suspended."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_suspended_stage_is_lost_and_ends_by_itself_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short form of the next test: one process without workers."""
    monkeypatch.setattr(decisions, "ALIVE_SECONDS", 12.0)
    here = dict(os.environ)
    stages = {"images": {"job": "ingest", "source": {"kind": "digits"}}}
    store = open_store(str(tmp_path / "s"))
    run = start_run(store, parse_pipeline({"name": "some", "stages": stages}, "test"), ("images",))
    console = Console(file=StringIO(), width=160)
    with (
        ThreadPoolExecutor(1) as threads,
        LocalConnection(print) as connection,
        RunDisplay(console, 6) as display,
    ):
        connection.cluster()
        walk = threads.submit(Driver(store, run, connection, display, 1).walk)
        wait_for(lambda: list(tmp_path.glob("s/artifacts/ingest/*/attempts/1/alive.json")), 60)
        (stage,) = matching(here, "-m ray_jobs.ingest", str(tmp_path))
        supervisor = suspended(stage, [])
        try:
            status, (made,) = walk.result(timeout=120)
            assert status == {"images": "SUCCEEDED"}
            assert made.manifest is not None
            assert made.manifest.attempt == 2
            assert "no sign of life for 12 s; another attempt" in console.file.getvalue()  # type: ignore[attr-defined]
            assert not is_over(stage)
            stage.resume()
            wait_for(lambda: is_over(stage), 10)
        finally:
            for process in (stage, supervisor):
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        first = read_attempt(store, Layout.attempt("ingest", made.manifest.key, 1))
        assert first is not None
        wait_for(lambda: "has taken over" in connection.cluster().logs(first.submission_id), 10)
    assert read_manifest(store, "ingest", made.manifest.key) == made.manifest
    assert store.names(Layout.files("ingest", made.manifest.key, 1)) == []


@pytest.mark.full
@pytest.mark.timeout(1200)  # two trainings of 10,000 steps, and five starts of a stage
def test_a_training_that_is_suspended_and_then_stopped_is_one_chain_of_checkpoints(
    own_ray: dict[str, str], tmp_path: Path
) -> None:
    """Suspended, it is lost after 20 s; it wakes while the next attempt trains, and ends by itself.

    Ctrl-C then ends the next attempt, which saves its state first. The same command makes the third, which ends with
    the bytes of an undisturbed run.
    """
    own_ray["RAY_JOB_STOP_WAIT_TIME_S"] = "30"  # between SIGTERM and SIGKILL
    every = 1000
    changes = [f"steps={10 * every}", "workers=1", "threads=1", f"checkpoint_every={{steps: {every}}}"]
    train = partial(
        start,
        environment=own_ray,
        only="pretrain",
        changes=[f"pretrain.{change}" for change in changes],
        alive_seconds=20.0,
    )
    store = tmp_path / "s"
    signs, saved = partial(signs_of_life, store), partial(saved_steps, store)
    driver = train(store)
    wait_for(lambda: signs(1).get("step") and saved(1))
    (stage,) = matching(own_ray, "-m ray_jobs.pretrain")
    workers = matching(own_ray, "ray::RayTrainWorker") + matching(own_ray, "ray::TrainController")
    assert len(workers) == 2
    supervisor, began = suspended(stage, workers), time.monotonic()
    last, first_saved = signs(1), saved(1)
    wait_for(lambda: list(store.glob("artifacts/pretrain/*/attempts/2")))
    assert time.monotonic() - began >= 20 - 5, "the last sign of life came up to 5 s before"
    wait_for(lambda: signs(2).get("step"))
    assert signs(1) == last
    for process in (stage, *workers):
        process.resume()
    wait_for(lambda: all(map(is_over, (stage, *workers))), 20)
    supervisor.resume()
    undisturbed = train(tmp_path / "undisturbed")  # on the core that is free now
    assert signs(1) == last
    assert saved(1) <= first_saved
    assert "pretrain" not in manifests(store), "the next attempt is still training"

    before = max(saved(2) | first_saved)
    driver.send_signal(signal.SIGINT)
    out, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130, out
    wait_for(lambda: not matching(own_ray, "-m ray_jobs.pretrain", str(store)), 40)
    told = max(saved(2))
    assert told > before, "saved after it was told to end"
    finish(train(store))
    finish(undisturbed)
    ours, theirs = (manifests(root)["pretrain"] for root in (store, tmp_path / "undisturbed"))
    assert ours["attempt"] == 3
    assert repeated(ours["files"]) == repeated(theirs["files"])
    starts = [json.loads(path.read_text()) for path in sorted(store.glob("artifacts/pretrain/*/attempts/*/start.json"))]
    assert [(each["attempt"], each["step"]) for each in starts] == [
        (None, None),
        (1, max(first_saved)),
        (2, told),
    ]
    assert ours["metrics"]["continued_at_step"] == told
    results = store.glob("artifacts/pretrain/*/attempts/[12]/files/**/*")
    assert not [path for path in results if path.is_file()], "no earlier attempt has made anything"
    assert saved(1) | saved(2) | saved(3) == set()


@pytest.mark.full
@pytest.mark.parametrize("number", range(int(os.environ.get("VITFLOW_FAULT_ROUNDS", "1"))))
def test_kills_at_random_moments(number: int, own_ray: dict[str, str], tiny_store: Path, tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("VITFLOW_FAULT_SEED", "0")) + number)
    store = tmp_path / "s"
    for victim in chance.sample(list(VICTIMS), k=2):
        driver = start(store, own_ray)
        time.sleep(chance.uniform(0.3, 25))
        kill(VICTIMS[victim](own_ray))
        time.sleep(chance.uniform(0, 2))
        driver.kill()
        driver.communicate()
        for manifest in manifests(store).values():
            folder = files_of(store, manifest)
            assert all((folder / file["path"]).is_file() for file in manifest["files"]), "half an artifact"
    committed = {stage: manifest["nonce"] for stage, manifest in manifests(store).items()}
    finish(start(store, own_ray))
    after = {stage: manifest["nonce"] for stage, manifest in manifests(store).items()}
    assert committed.items() <= after.items(), "what was committed was made again"
    check_whole(store, tiny_store)
