"""`vitflow report query` over 1,000,000 rows in 1,000 files, as a whole process: `python benchmarks/report_query.py`.

Makes a store of 1,000 committed evaluations of 1,000 rows each, in a temporary folder and once more on moto's S3
server, and asks it the same questions several times. Prints the table and keeps it in benchmarks/results/.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

ARTIFACTS, ROWS_EACH = 1_000, 1_000
METHODS = ("ViT, pretrained", "ViT, untrained", "pixels", "pixels, standardised")
SHOTS = (1, 5, 10, 25, None)


def generate(uri: str, artifacts: int = ARTIFACTS) -> None:
    """Commit `artifacts` evaluations of ROWS_EACH rows: manifests and Parquet as the stages write them."""
    from concurrent.futures import ThreadPoolExecutor

    from pipelines.store import open_store

    store = open_store(uri)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: _evaluation(store, number), range(artifacts)))


def _evaluation(store: Any, number: int) -> None:
    from pipelines.identity import sha256
    from pipelines.store import InputRef, Layout, Manifest, commit
    from ray_jobs.rows import PREDICTIONS, ROWS, scored, write_table
    import numpy as np

    rng = np.random.default_rng(number)
    key = sha256(f"evaluation {number}")
    task = f"task{number % 20}"
    rows, predictions = [], []
    labels = np.zeros(4, int)
    for place in range(ROWS_EACH):
        method = METHODS[place % 4]
        shots = SHOTS[place // 4 % 5]
        common = {"task": task, "protocol": "few-shot linear", "method": method, "labels_per_class": shots, "draw": place // 20}
        row, images = scored(common, [f"{i:064x}" for i in range(4)], labels, rng.integers(0, 2, 4), "leave-one-out on the support", {"l2": float(2.0 ** rng.integers(-6, 6)), "standardised": True, "width": 192})
        rows.append(row | {"value": float(rng.random()), "num_images": 540})
        predictions += images
    with store.staging(Layout.files("evaluate", key, 1)) as staging:
        write_table(staging.path / "rows.parquet", rows, ROWS)
        write_table(staging.path / "predictions.parquet", predictions, PREDICTIONS)
    ref = [InputRef(job="ingest", key=sha256("data"), content_digest=sha256("d"), manifest_sha256=sha256("m"))]
    commit(store, Manifest(
        job="evaluate", kind="evaluation", key=key, content_digest=sha256(key), stage=f"probe_{number % 7}", run=f"study-20261121-{number // 100:06d}-abcd",
        attempt=1, nonce="n", files=staging.files, inputs={"data": ref, "backbone": ref},
        config={"job": "evaluate", "data": "digits", "backbone": "pretrain", "shots": [1, 5, 10, 25], "draws": 20, "seed": 0, "threads": 1},
        source=None, metrics={f"{m} @ {s}": float(rng.random()) for m in METHODS for s in SHOTS},
        code={"version": 1, "digest": sha256("c"), "git": "0" * 40, "dirty": False},
        environment={"python": "3.11.7", "machine": "x86_64", "processor": "AMD EPYC", "cluster": {"CPU": 2.0}, "packages": {n: "2.13.0" for n in ("torch", "ray", "deepspeed", "pyarrow", "numpy", "pillow", "scikit-learn", "matplotlib")}},
        started="2026-11-21T13:58:18.513312+00:00", finished=f"2026-11-21T13:{number // 60 % 60:02d}:{number % 60:02d}.949836+00:00", user="root@vm"))


if __name__ == "__main__":
    generate(sys.argv[1])
