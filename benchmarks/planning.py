"""How fast a pipeline is planned: `python benchmarks/planning.py`.

Measures, one after the other on an otherwise idle machine; prints the table and writes it to benchmarks/results/:
- planning a matrix of 500 stages, in a folder and on moto's S3 (a separate server), with none and with all of them
  finished: reading the recipe, expanding, checking, keys, the store's objects (median of 5);
- a rerun with nothing to do, as a whole process, in turn with `dvc repro` of the same number of stages (PyPI's dvc, in
  a temporary environment; median of 7). The artifacts are made up: planning reads records and compares the sizes of
  files, and dvc also their times.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, keep, setting, values

from pipelines.engine.plan import PlannedStage, plan_pipeline
from pipelines.files.s3_client import client
from pipelines.recipe.load import load_pipeline
from pipelines.store import Layout, Store, open_store
from tests.support.records import commit_planned

STAGES = 500
RERUNS = (10, 100)  # stages
RECIPE = """
name: study
stages:
  digits:
    job: ingest
    source: {{kind: digits}}
  pretrain:
    job: pretrain
    data: digits
    model: {{patch_size: 4, width: 16, depth: 1, num_heads: 2}}
    resolution: 8
    steps: 20
    batch_size: 32
    learning_rate: 1.0e-3
    matrix: {{seed: {seeds}}}
"""
Row = tuple[str, float, str]


def main() -> None:
    """Measure everything and keep the table."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vfb-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        rows = []
        for row in measured(folder):
            print(*row, file=sys.stderr, flush=True)
            rows.append(row)
    title = "# Planning, and reruns with nothing to do"
    keep("planning.md", [title, "", f"`python benchmarks/planning.py`, {setting(load)}.", "", *values(rows)])


def measured(folder: Path) -> Iterator[Row]:
    """Yield the rows, each as soon as it is measured."""
    yield from planned(folder, str(folder / "store"), "in a folder", "< 1 s")
    with moto() as address:
        yield from planned(folder, address, "on moto", "< 3 s")
    dvc = install_dvc(folder / "venv")
    for stages in RERUNS:
        yield from reruns(folder, dvc, stages)


def recipe(folder: Path, stages: int) -> Path:
    """Write a recipe of this many stages: an ingest, and one pretraining per seed."""
    path = folder / f"{stages}.yaml"
    path.write_text(RECIPE.format(seeds=list(range(stages - 1))))
    return path


def planned(folder: Path, uri: str, where: str, target: str) -> list[Row]:
    """Time the plan of the matrix before and after its stages are finished."""
    store, file = open_store(uri), recipe(folder, STAGES)

    def plan() -> list[PlannedStage]:
        pipeline = load_pipeline(str(file))
        return plan_pipeline(store, pipeline, pipeline.needed_for(tuple(pipeline.stages)))

    make(store, [stage for stage in plan() if stage.config.job == "ingest"])
    rows = []
    for state in ("run", "cached"):
        seconds, found = timed(plan, 5)
        assert {stage.state for stage in found} == {state, "cached"}, found
        made = "none" if state == "run" else "all"
        rows.append((f"planning {STAGES} stages {where}, {made} finished", seconds, target))
        make(store, [stage for stage in found if stage.state == "run"])
    return rows


def timed(call: Callable[[], Any], times: int) -> tuple[float, Any]:
    """Return (median seconds, the last result)."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), found


def make(store: Store, stages: list[PlannedStage]) -> None:
    """Commit a made-up artifact for each stage, with records as large as real ones, and tiny files."""

    def one(stage: PlannedStage) -> None:
        with store.staging(Layout.files(stage.config.job, stage.key, 1)) as staging:
            for number in range(6):
                (staging.path / f"{number}.parquet").write_bytes(bytes(number))
        metrics = {"loss": 1.0, "accuracy": 0.5, "train_seconds": 1.0}
        environment = {"packages": {f"package-{n}": "1.0.0" for n in range(8)}}
        commit_planned(store, stage, "made-up", files=staging.files, metrics=metrics, environment=environment)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, stages))


@contextmanager
def moto() -> Iterator[str]:
    """Start a moto server; yield the address of an empty store on it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ |= {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": "us-east-1",
    }
    try:
        wait_for(port)
        client().create_bucket(Bucket="benchmark")
        yield "s3://benchmark/store"
    finally:
        server.terminate()
        server.wait()


def wait_for(port: int) -> None:
    """Wait until a server listens on this port."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def reruns(folder: Path, dvc: Path | None, stages: int) -> Iterator[Row]:
    """Time our rerun and dvc's, in turn."""
    file, store = recipe(folder, stages), folder / f"store-{stages}"
    make_all(file, store)
    ours = [sys.executable, "-m", "pipelines", "run", str(file), "--store", str(store)]
    commands = {"`vitflow run`": (ours, ROOT)}
    if dvc is not None:
        commands["`dvc repro`"] = ([str(dvc), "repro"], dvc_project(folder / f"dvc-{stages}", dvc, stages))
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(7):
        for name, (command, where) in commands.items():
            began = time.perf_counter()
            done = subprocess.run(command, cwd=where, capture_output=True, text=True, env=environment())
            seconds[name].append(time.perf_counter() - began)
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
    for name, taken in seconds.items():
        target = "faster than dvc" if name == "`vitflow run`" else ""
        yield f"rerun of {stages} stages with nothing to do, {name}", statistics.median(taken), target


def make_all(file: Path, folder: Path) -> None:
    """Commit made-up artifacts until nothing is left to run."""
    store, pipeline = open_store(str(folder)), load_pipeline(str(file))
    while ready := [s for s in plan_pipeline(store, pipeline, pipeline.order()) if s.state == "run"]:
        make(store, ready)


def install_dvc(folder: Path) -> Path | None:
    """Install dvc into a separate environment and return its path; if that fails, print a message and return None."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    done = subprocess.run([str(folder / "bin" / "pip"), "install", "-q", "dvc"], capture_output=True, text=True)
    if done.returncode:
        print(f"dvc is left out; it cannot be installed: {done.stderr.strip()[-300:]}", file=sys.stderr)
        return None
    return folder / "bin" / "dvc"


def dvc_project(folder: Path, dvc: Path, stages: int) -> Path:
    """Make and run an equivalent dvc project: one stage writes a file, the others read it, each with its own seed."""
    folder.mkdir()
    made: dict[str, Any] = {"digits": {"cmd": "echo digits > digits.txt", "outs": ["digits.txt"]}}
    for seed in range(stages - 1):
        made[f"pretrain-{seed}"] = {
            "cmd": f"echo {seed} > model-{seed}.txt",
            "deps": ["digits.txt"],
            "params": [f"seeds.s{seed}"],
            "outs": [f"model-{seed}.txt"],
        }
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": made}))
    (folder / "params.yaml").write_text(yaml.safe_dump({"seeds": {f"s{n}": n for n in range(stages - 1)}}))
    for arguments in (["init", "--no-scm", "-q"], ["repro", "-q"]):
        subprocess.run([str(dvc), *arguments], cwd=folder, check=True, env=environment())
    return folder


def environment() -> dict[str, str]:
    """Return the environment, with dvc's telemetry off."""
    return os.environ | {"DVC_NO_ANALYTICS": "1"}


if __name__ == "__main__":
    main()
