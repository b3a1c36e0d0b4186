"""SIGKILL at any moment, then the same command: it goes on, nothing committed is done twice, nothing half is visible.

VITFLOW_FAULT_ROUNDS (default 1) and VITFLOW_FAULT_SEED make the random test longer: `make test-faults`.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from pipelines.store import Layout, open_store, read_events
from tests.support.paths import TINY

ONLY = ("--only", "probe")  # ingest, pretraining on two workers, evaluation
MARK = "VITFLOW_RAY_INSTANCE"
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def own_ray() -> Iterator[dict[str, str]]:
    """The environment of a local Ray of the test's own, which it may hurt; afterwards nothing of it may live."""
    folder = Path(tempfile.mkdtemp(prefix="vff-"))
    environment = os.environ | {"VITFLOW_RAY_DIR": str(folder / "ray"), "VITFLOW_RAY_IDLE_SECONDS": "3"}
    yield environment
    deadline = time.monotonic() + 60
    while (left := ray_processes(environment)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, "processes of the local Ray are left after its idle time"
    shutil.rmtree(folder)


def ray_processes(environment: dict[str, str]) -> list[psutil.Process]:
    """Every process that was started with this state folder: keepers, Ray, jobs, workers."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("VITFLOW_RAY_DIR") == environment["VITFLOW_RAY_DIR"]
                and process.pid != os.getpid()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def start(
    store: Path, environment: dict[str, str], arguments: Sequence[str] = (str(TINY), *ONLY)
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipelines", "run", *arguments, "--store", str(store)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(store: Path, environment: dict[str, str], arguments: Sequence[str] = (str(TINY), *ONLY)) -> str:
    process = start(store, environment, arguments)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    return out


def wait_for(condition: Callable[[], object], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.05)


def matching(environment: dict[str, str], *words: str) -> list[psutil.Process]:
    found = []
    for process in ray_processes(environment):
        try:
            line = " ".join([process.name(), *process.cmdline()])
        except psutil.Error:
            continue
        if all(word in line for word in words):
            found.append(process)
    return found


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


VICTIMS: dict[str, Callable[[dict[str, str]], list[psutil.Process]]] = {
    "driver": lambda environment: matching(environment, "pipelines", "run", "--store"),
    "stage": lambda environment: matching(environment, "-m ray_jobs."),
    "worker": lambda environment: matching(environment, "ray::")[:1],
    "keeper": lambda environment: matching(environment, "pipelines.cluster.local", "keep"),
    "head": lambda environment: matching(environment, "gcs_server"),
}


def artifacts(store: Path) -> dict[str, dict]:  # type: ignore[type-arg]
    found = [json.loads(path.read_text()) for path in store.glob("artifacts/*/*/manifest.json")]
    return {manifest["stage"]: manifest for manifest in found}


def files_of(store: Path, manifest: dict) -> Path:  # type: ignore[type-arg]
    return store / Layout.files(manifest["job"], manifest["key"], manifest["attempt"])


def check_whole(store: Path, reference: Path) -> None:
    """Everything there, whole, and equal to what an undisturbed run makes."""
    import hashlib

    ours, theirs = artifacts(store), artifacts(reference)
    assert set(ours) == {"digits", "pretrain", "probe"}
    for stage, manifest in ours.items():
        folder = files_of(store, manifest)
        for file in manifest["files"]:
            assert hashlib.sha256((folder / file["path"]).read_bytes()).hexdigest() == file["sha256"]
        expected = {file["path"]: file["sha256"] for file in theirs[stage]["files"]}
        assert {file["path"]: file["sha256"] for file in manifest["files"]} == expected, stage


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an undisturbed run makes."""
    store = tmp_path_factory.mktemp("reference")
    finish(store, dict(os.environ))
    return store


@pytest.mark.full
def test_two_drivers_at_once_run_each_stage_once(
    own_ray: dict[str, str], reference: Path, tmp_path: Path
) -> None:
    drivers = [start(tmp_path / "s", own_ray) for _ in range(2)]
    for driver in drivers:
        out, _ = driver.communicate(timeout=400)
        assert driver.returncode == 0, out
    assert [path.name for path in (tmp_path / "s").glob("artifacts/*/*/attempts/*")] == ["1"] * 3
    check_whole(tmp_path / "s", reference)


def test_a_driver_that_is_killed_is_followed_by_one_that_takes_its_job_over(
    own_ray: dict[str, str], reference: Path, tmp_path: Path
) -> None:
    driver = start(tmp_path / "s", own_ray)
    wait_for(lambda: matching(own_ray, "-m ray_jobs.pretrain"))
    driver.kill()
    driver.communicate()
    out = finish(tmp_path / "s", own_ray)
    assert "continuing" in out
    assert [path.name for path in (tmp_path / "s").glob("artifacts/*/*/attempts/*")] == ["1"] * 3, (
        "no job was repeated"
    )
    assert len(list((tmp_path / "s" / "runs").iterdir())) == 1, "under the same run id"
    check_whole(tmp_path / "s", reference)


@pytest.mark.full
def test_ctrl_c_stops_the_jobs_and_says_how_to_continue(own_ray: dict[str, str], tmp_path: Path) -> None:
    driver = start(tmp_path / "s", own_ray)
    wait_for(lambda: matching(own_ray, "-m ray_jobs.pretrain"))
    driver.send_signal(signal.SIGINT)
    out, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130, out
    assert "to continue: vitflow run" in out
    wait_for(lambda: not matching(own_ray, "-m ray_jobs.pretrain"), 20)
    assert "pretrain" not in artifacts(tmp_path / "s")


@pytest.mark.full
def test_stop_from_elsewhere_ends_the_run(own_ray: dict[str, str], tmp_path: Path) -> None:
    driver = start(tmp_path / "s", own_ray)
    wait_for(lambda: matching(own_ray, "-m ray_jobs.pretrain"))
    (run,) = [path.name for path in (tmp_path / "s" / "runs").iterdir()]
    said = subprocess.run(
        [sys.executable, "-m", "pipelines", "stop", run, "--store", str(tmp_path / "s")],
        env=own_ray,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert "stopped pretrain-" in said
    out, _ = driver.communicate(timeout=60)
    assert driver.returncode == 1, out
    assert re.search(r"pretrain +STOPPED", out)
    assert "pretrain" not in artifacts(tmp_path / "s")


@pytest.mark.full
def test_stages_that_wait_for_a_slot_are_not_begun_after_stop(
    own_ray: dict[str, str], vitflow: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Four independent stages, one slot: the slot that the stopped stage leaves is given to nobody."""
    stages = {
        name: {"job": "ingest", "source": {"kind": "digits"}, "max_bad_fraction": fraction}
        for name, fraction in {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}.items()
    }
    recipe = tmp_path / "four.yaml"
    recipe.write_text(json.dumps({"name": "four", "stages": stages}))  # JSON is YAML
    store = open_store(str(tmp_path / "s"))
    driver = start(store.root, own_ray, [str(recipe), "-p", "1"])
    wait_for(lambda: list(store.root.glob("runs/*/plan.json")))
    (run,) = store.names("runs")
    wait_for(lambda: any(event.get("status") == "RUNNING" for event in read_events(store, run)))
    vitflow("stop", run, "--store", store.root, **own_ray)
    out, _ = driver.communicate(timeout=20)
    assert driver.returncode == 1, out
    assert "stopped; to continue: vitflow run" in out
    wished = json.loads((store.root / "runs" / run / "stop.json").read_text())["time"]
    begun = {
        event["stage"]: event["time"] for event in read_events(store, run) if event.get("status") == "PENDING"
    }
    assert set(begun) == {"a"}, "one slot"
    assert begun["a"] < wished
    status = json.loads(vitflow("status", run, "--store", store.root, "--json").stdout)
    assert status["status"] == "STOPPED"
    assert {stage["status"] for stage in status["stages"]} == {"STOPPED"}
    assert artifacts(store.root) == {}
    finish(store.root, own_ray, [str(recipe)])
    assert set(artifacts(store.root)) == set(stages)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["worker", "head"])
def test_death_during_pretraining(
    victim: str, own_ray: dict[str, str], reference: Path, tmp_path: Path
) -> None:
    """A training worker or the head dies: the driver that lives on makes another attempt, with the same weights."""
    driver = start(tmp_path / "s", own_ray)
    wait_for(lambda: matching(own_ray, "ray::RayTrainWorker"))
    kill(matching(own_ray, "ray::RayTrainWorker")[:1] if victim == "worker" else VICTIMS["head"](own_ray))
    out, _ = driver.communicate(timeout=400)
    assert driver.returncode == 0, out
    check_whole(tmp_path / "s", reference)


@pytest.mark.full
@pytest.mark.parametrize("number", range(int(os.environ.get("VITFLOW_FAULT_ROUNDS", "1"))))
def test_kills_at_random_moments(
    number: int, own_ray: dict[str, str], reference: Path, tmp_path: Path
) -> None:
    chance = random.Random(int(os.environ.get("VITFLOW_FAULT_SEED", "0")) + number)
    store = tmp_path / "s"
    for victim in chance.sample(list(VICTIMS), k=2):
        driver = start(store, own_ray)
        time.sleep(chance.uniform(0.3, 25))
        kill(VICTIMS[victim](own_ray))
        time.sleep(chance.uniform(0, 2))
        driver.kill()
        driver.communicate()
        for manifest in artifacts(store).values():
            whole = all((files_of(store, manifest) / file["path"]).is_file() for file in manifest["files"])
            assert whole, "half an artifact"
    committed = {stage: manifest["nonce"] for stage, manifest in artifacts(store).items()}
    finish(store, own_ray)
    after = {stage: manifest["nonce"] for stage, manifest in artifacts(store).items()}
    assert committed.items() <= after.items(), "what was committed was made again"
    check_whole(store, reference)
