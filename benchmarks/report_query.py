"""`vitflow report query` over 1,000,000 rows in 1,000 files, as a whole process: `python benchmarks/report_query.py`.

Commits 1,000 evaluations of 1,000 rows each to a store in a temporary folder (a minute or two), with manifests and
Parquet as the stages write them, runs each query 9 times, prints the table and writes it to benchmarks/results/.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from common import keep, setting

from pipelines.identity import sha256
from pipelines.spec import Evaluate
from pipelines.store import InputRef, Layout, Store, commit, open_store
from ray_jobs.evaluation.rows import ROWS, write_table
from tests.support.records import make_manifest

ARTIFACTS, DRAWS, TIMES = 1_000, 50, 9
METHODS = ("ViT, pretrained", "ViT, untrained", "pixels", "pixels, standardised")
SHOTS = (1, 5, 10, 25, None)
MEANS = "SELECT task, method, labels_per_class, avg(value) FROM rows GROUP BY ALL ORDER BY ALL"
QUESTIONS = {
    "mean accuracy of each task, method and number of labels": MEANS,
    "the ten best artifacts": "SELECT artifact, avg(value) AS mean FROM rows GROUP BY ALL ORDER BY mean DESC LIMIT 10",
    "how many rows": "SELECT count(*) FROM rows",
    "artifacts of each run": "SELECT run, count(*) FROM artifacts GROUP BY ALL",
}


def main() -> None:
    """Make the store, query it, keep the table."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vfb-") as folder:
        store = open_store(folder)
        for number in range(ARTIFACTS):
            commit_evaluation(store, number)
        lines = [measured(what, sql, folder) for what, sql in QUESTIONS.items()]
    head = [
        "# report query over 1,000,000 rows in 1,000 files",
        "",
        f"`python benchmarks/report_query.py`, {setting(load)}. Target: < 0.5 s, whole process, {TIMES} times, store "
        "in a folder.",
        "",
        "| question | median | minimum | CPU time, median |",
        "|---|---:|---:|---:|",
    ]
    keep("report_query.md", [*head, *lines])


def commit_evaluation(store: Store, number: int) -> None:
    """Commit an artifact with DRAWS * 20 rows."""
    rng = np.random.default_rng(number)
    key = sha256(f"evaluation {number}")
    rows = [
        {
            "task": f"task {number % 20}",
            "protocol": "few-shot linear",
            "method": method,
            "labels_per_class": shots,
            "draw": draw,
            "split": "test",
            "metric": "accuracy",
            "value": float(rng.random()),
            "num_images": 540,
            "selected_on": "leave-one-out on the support",
            "settings": f'{{"l2": {2.0 ** rng.integers(-6, 6)}, "standardised": true, "width": 192}}',
        }
        for method in METHODS
        for shots in SHOTS
        for draw in range(DRAWS)
    ]
    with store.staging(Layout.files("evaluate", key, 1)) as staging:
        write_table(staging.path / "rows.parquet", rows, ROWS)
    reference = InputRef(job="ingest", key=key, content_digest=sha256("content"), manifest_sha256=sha256("manifest"))
    config = Evaluate(job="evaluate", data="digits", backbone="pretrain")
    time_of_it = f"2026-11-{1 + number // 1000:02d}T13:{number // 60 % 60:02d}:{number % 60:02d}.949836+00:00"
    manifest = make_manifest(
        "evaluate",
        key=key,
        content_digest=sha256(key),
        stage=f"probe_{number % 7}",
        run=f"study-20261121-{number // 100:06d}-abcd",
        nonce=sha256("nonce"),
        files=staging.files,
        inputs={"data": [reference], "backbone": [reference]},
        config=config.model_dump(mode="json"),
        metrics={f"{method} @ {shots or 'all'}": float(rng.random()) for method in METHODS for shots in SHOTS},
        code={"version": 1, "digest": sha256("code"), "git": "0" * 40, "dirty": False},
        environment={
            "python": "3.11.7",
            "machine": "x86_64",
            "processor": "a processor",
            "cluster": {"CPU": 2.0},
            "packages": dict.fromkeys(("torch", "ray", "deepspeed", "pyarrow", "numpy"), "1.2.3"),
        },
        started=time_of_it,
        finished=time_of_it,
        user="somebody@somewhere",
    )
    commit(store, manifest)


def measured(what: str, sql: str, store: str) -> str:
    """Run the whole process TIMES times; return a line of the table."""
    command = [sys.executable, "-m", "pipelines", "report", "query", sql, "--store", store, "--csv"]
    wall, cpu = [], []
    for _ in range(TIMES):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        wall.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return f"| {what} | {statistics.median(wall):.2f} s | {min(wall):.2f} s | {statistics.median(cpu):.2f} s |"


if __name__ == "__main__":
    main()
