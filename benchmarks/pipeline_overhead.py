"""The overhead of the engine: `python benchmarks/pipeline_overhead.py`.

Measures, one after the other on an otherwise idle machine; prints the table and writes it to benchmarks/results/:
- a rerun with nothing to do, as a whole process (median of 9);
- the shared local Ray: its start, the first job, later jobs;
- the overhead of each kind of stage, on a running Ray: wall time of its job on the tiny recipe, which has almost no
  work, minus the training seconds that pretraining and fine-tuning record;
- pretraining's images per second inside Ray Train and DeepSpeed at width 64, depth 4, 17 tokens, global batch 256.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from common import ROOT, keep, keep_ray_below, setting, values

TINY = ROOT / "tests" / "tiny.yaml"
TARGETS = {
    "rerun": "< 0.5 s",
    "ingest": "<= 5 s",
    "evaluate": "<= 5 s",
    "baselines": "<= 5 s",
    "report": "<= 5 s",
    "pretrain": "<= 15 s",
    "finetune": "<= 15 s",
}


def main() -> None:
    """Measure everything and keep the table."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vfb-") as name:
        folder = Path(name)
        keep_ray_below(folder)
        rows = [*local_ray(), *stages(folder), *rerun(folder), *throughput(folder)]
        from pipelines.cluster.local import shut_down

        shut_down()
    head = ["# Overhead of the engine", "", f"`python benchmarks/pipeline_overhead.py`, {setting(load)}.", ""]
    keep("pipeline_overhead.md", [*head, *values(rows)])


def vitflow(*arguments: str | Path) -> tuple[float, str]:
    """Run the command line as a whole process; return (seconds, output)."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "pipelines", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.perf_counter() - began, done.stdout


def local_ray() -> list[tuple[str, float, str]]:
    """Time the start of the local Ray, and empty jobs on it."""
    from pipelines.cluster.local import hold

    began = time.perf_counter()
    rows = []
    with hold() as ray:
        rows.append(("local Ray: start", time.perf_counter() - began, ""))
        cluster = ray.cluster()
        seconds = []
        for number in range(4):
            began = time.perf_counter()
            cluster.submit(f"empty-{number}", "exec true", {}, {})
            while (job := cluster.job(f"empty-{number}")) is None or job.status in {"PENDING", "RUNNING"}:
                time.sleep(0.02)
            seconds.append(time.perf_counter() - began)
    rows.append(("local Ray: first job", seconds[0], ""))
    rows.append(("local Ray: later jobs (median of 3)", statistics.median(seconds[1:]), ""))
    return rows


def stages(folder: Path) -> list[tuple[str, float, str]]:
    """Time each stage of the tiny recipe alone, on a running Ray. It runs twice, in two stores; the second counts."""
    names = ("digits", "pretrain", "finetune", "probe", "pixels", "report")
    seconds: dict[str, float] = {}
    for store in ("warm", "measured"):
        for name in names:
            vitflow("run", TINY, "--store", folder / store, "--only", name)
    for manifest in manifests(folder / "measured"):
        seconds[manifest["stage"]] = wall_seconds(folder / "measured", manifest) - own_seconds(manifest)
    jobs = {manifest["stage"]: manifest["job"] for manifest in manifests(folder / "measured")}
    return [(f"stage {jobs[name]}: overhead", seconds[name], TARGETS[jobs[name]]) for name in names]


def manifests(store: Path) -> list[dict[str, Any]]:
    """Return the manifests of all committed artifacts of a store."""
    return [json.loads(path.read_text()) for path in store.glob("artifacts/*/*/manifest.json")]


def wall_seconds(store: Path, manifest: dict[str, Any]) -> float:
    """Return the seconds from the attempt's record (before its job is submitted) to its commit."""
    folder = store / "artifacts" / manifest["job"] / manifest["key"] / "attempts" / str(manifest["attempt"])
    created = json.loads((folder / "attempt.json").read_text())["created"]
    return (datetime.fromisoformat(manifest["finished"]) - datetime.fromisoformat(created)).total_seconds()


def own_seconds(manifest: dict[str, Any]) -> float:
    """Return the training seconds that a stage recorded."""
    return float(manifest["metrics"].get("train_seconds", 0.0))


def rerun(folder: Path) -> list[tuple[str, float, str]]:
    """Time a run whose stages are all cached."""
    seconds = [vitflow("run", TINY, "--store", folder / "measured")[0] for _ in range(9)]
    return [("rerun with nothing to do, whole process", statistics.median(seconds), TARGETS["rerun"])]


def throughput(folder: Path) -> list[tuple[str, float, str]]:
    """Measure the quickstart's pretraining, shortened."""
    vitflow("run", "quickstart", "--store", folder / "q", "--only", "pretrain", "--set", "pretrain.steps=500")
    (model,) = [manifest for manifest in manifests(folder / "q") if manifest["job"] == "pretrain"]
    return [("pretraining, images/s (2 workers, ZeRO-1, bf16)", model["metrics"]["images_per_second"], ">= 5000")]


if __name__ == "__main__":
    main()
