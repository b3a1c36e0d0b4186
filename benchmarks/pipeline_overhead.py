"""The overhead of the engine: `python benchmarks/pipeline_overhead.py`.

Measures, one after the other on an otherwise idle machine; prints the table and writes it to benchmarks/results/:
- the shared local Ray: its start, the first job, later jobs;
- the overhead of each kind of stage, on a running Ray: wall time of its job on the tiny recipe, which has almost no
  work, minus the training seconds that pretraining and fine-tuning record.

benchmarks/planning.py times reruns with nothing to do, and benchmarks/pretrain.py pretraining's images per second.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from common import ROOT, keep, keep_ray_below, setting, values, vitflow

from tests.support.stores import manifests

TINY = ROOT / "tests" / "tiny.yaml"
TARGETS = {
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
        rows = [*local_ray(), *stages(folder)]
        from pipelines.cluster.local import shut_down

        shut_down()
    head = ["# Overhead of the engine", "", f"`python benchmarks/pipeline_overhead.py`, {setting(load)}.", ""]
    keep("pipeline_overhead.md", [*head, *values(rows)])


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
    for store in ("warm", "measured"):
        for name in names:
            vitflow("run", str(TINY), "--only", name, store=folder / store)
    made = manifests(folder / "measured")
    return [
        (f"stage {(job := made[name]['job'])}: overhead", overhead(folder / "measured", made[name]), TARGETS[job])
        for name in names
    ]


def overhead(store: Path, manifest: dict[str, Any]) -> float:
    """Return the seconds from the attempt's record (before its job is submitted) to its commit, without training."""
    folder = store / "artifacts" / manifest["job"] / manifest["key"] / "attempts" / str(manifest["attempt"])
    created = json.loads((folder / "attempt.json").read_text())["created"]
    taken = datetime.fromisoformat(manifest["finished"]) - datetime.fromisoformat(created)
    return taken.total_seconds() - float(manifest["metrics"].get("train_seconds", 0.0))


if __name__ == "__main__":
    main()
