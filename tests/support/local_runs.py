"""`vitflow run` in a process of its own, on a local Ray of its own, and what is needed to hurt both."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.support.paths import TINY


@contextmanager
def a_local_ray() -> Iterator[dict[str, str]]:
    """Yield the environment of a local Ray that nobody else uses; afterwards nothing of it may live.

    What a test that failed has left is killed, so that it disturbs no other.
    """
    folder = Path(tempfile.mkdtemp(prefix="vff-"))
    environment = os.environ | {"VITFLOW_RAY_DIR": str(folder / "ray"), "VITFLOW_RAY_IDLE_SECONDS": "3"}
    yield environment
    deadline = time.monotonic() + 60
    while (left := ray_processes(environment)) and time.monotonic() < deadline:
        time.sleep(0.5)
    kill(left)
    assert not left, "processes of the local Ray are left after its idle time"
    shutil.rmtree(folder)


def ray_processes(environment: Mapping[str, str]) -> list[psutil.Process]:
    """Every process that was started with this state folder: keepers, Ray, jobs, workers."""
    started = []
    for process in psutil.process_iter():
        try:
            folder = process.environ().get("VITFLOW_RAY_DIR")
        except psutil.Error:
            continue
        if folder == environment["VITFLOW_RAY_DIR"] and process.pid != os.getpid():
            started.append(process)
    return started


IMPATIENT = """
from pipelines import cli
from pipelines.engine import decisions
decisions.ALIVE_SECONDS = {}
cli.main()
"""


def start(
    store: Path,
    environment: Mapping[str, str],
    only: str = "probe",
    changes: Sequence[str] = (),
    alive_seconds: float | None = None,
) -> subprocess.Popen[str]:
    """Run ingest, pretraining on two workers, and evaluation; or what one of these needs.

    `changes` to the recipe are of the form STAGE.FIELD=VALUE. `alive_seconds` replaces the minute after which the
    driver gives up an attempt without a sign of life.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background job it is ignored
    program = ["-m", "pipelines"] if alive_seconds is None else ["-c", IMPATIENT.format(alive_seconds)]
    command = [sys.executable, *program, "run", str(TINY), "--store", str(store)]
    return subprocess.Popen(
        [*command, "--only", only, *(word for change in changes for word in ("--set", change))],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(driver: subprocess.Popen[str]) -> str:
    """What a driver that succeeds prints."""
    out, _ = driver.communicate(timeout=400)
    assert driver.returncode == 0, out
    return out


def matching(environment: Mapping[str, str], *words: str) -> list[psutil.Process]:
    """Those whose name and command line contain all the words."""
    return with_words(ray_processes(environment), *words)


def with_words(processes: Iterable[psutil.Process], *words: str) -> list[psutil.Process]:
    """Those of the processes that still live and whose name and command line contain all the words."""
    matches = []
    for process in processes:
        try:
            line = " ".join([process.name(), *process.cmdline()])
        except psutil.Error:
            continue
        if all(word in line for word in words):
            matches.append(process)
    return matches


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def signs_of_life(store: Path, attempt: int) -> dict[str, Any]:
    """The sign of life of an attempt at the pretraining; empty before the first."""
    found = [*store.glob(f"artifacts/pretrain/*/attempts/{attempt}/alive.json")]
    return dict(json.loads(found[0].read_text())) if found else {}


def saved_steps(store: Path, attempt: int) -> set[int]:
    """The steps of an attempt's checkpoints."""
    manifests = store.glob(f"artifacts/pretrain/*/attempts/{attempt}/checkpoints/*/manifest.json")
    return {int(path.parent.name) for path in manifests}
