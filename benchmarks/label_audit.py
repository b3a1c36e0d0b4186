"""How many planted wrong labels an audit finds: `python benchmarks/label_audit.py`.

It replaces 5% of Fashion-MNIST's training labels by one of the other nine classes, each equally likely. The precision
is the share of planted labels among the first k of an audit, where k is the number of planted labels. The audits are
cross-validated trainings of a small ViT, and leave-one-out on the frozen features of the same ViT after a pretraining
without labels. For comparison: leave-one-out on random features of the pixels, which is not a stage. If an audit lists
a wrong label of the authors, it counts as a mistake of the audit.

Prints the table and writes it to benchmarks/results/label_audit.md; takes 10 to 20 minutes on two cores. With --store
the store is kept, and its results are reused.
"""

from __future__ import annotations

import argparse
import gzip
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import keep, query, setting, vitflow
from numpy.typing import NDArray

from pipelines.spec import FASHION_MNIST_ROOT
from ray_jobs.evaluation.label_issues import find_issues, left_out_probabilities, measure_list

IMAGES, CLASSES, SEED, TARGET = 60_000, 10, 0, 0.8
RANDOM_FEATURES = 2_000
_IMAGES_HEADER, _LABELS_HEADER = 16, 8  # bytes of IDX files
MODEL = "{patch_size: 7, width: 96, depth: 4, num_heads: 4, pooling: gap, gelu: exact}"
RECIPE = """
name: label_audit
stages:
  fashion:
    job: ingest
    source: {{kind: idx, root: {root}}}
  audit:
    job: audit
    data: fashion
    cross_validation:
      folds: 4
      model: {model}
      resolution: 28
      learning_rate: 3.0e-3
      steps: 3000
      batch_size: 128
      augment: shift_flip
  pretrain:
    job: pretrain
    data: fashion
    model: {model}
    resolution: 28
    objective: mae
    mae: {{decoder_depth: 1, decoder_width: 64}}
    steps: 2000
    batch_size: 128
    learning_rate: 1.0e-3
    augment: shift_flip
  audit_features:
    job: audit
    data: fashion
    backbone: pretrain
"""
NAMES = {
    "audit": "cross-validation: ViT of width 96, 4 folds of 3,000 steps",
    "audit_features": "leave-one-out: frozen features of the same ViT, MAE, 2,000 steps",
}


def main() -> None:
    """Plant wrong labels, audit, print the table and keep it."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--store", type=Path, help="keep the store here")
    given: Path | None = arguments.parse_args().store
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vfb-") as folder:
        root, store = Path(folder) / "planted", given or Path(folder) / "store"
        pixels, labels, planted = plant(root)
        recipe = Path(folder) / "label_audit.yaml"
        recipe.write_text(RECIPE.format(root=root, model=MODEL))
        vitflow("run", str(recipe), "--parallel", "1", store=store)
        rows = [random_features(pixels, labels, planted)]
        for stage, name in NAMES.items():
            rows.insert(0, audited(store, stage, name, planted))
    rows.sort(key=lambda row: -row["precision"])
    keep("label_audit.md", page(rows, len(planted), load))


def plant(root: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """Write the four files with wrong labels; return pixels [n, 784], these labels [n], and which of them are wrong."""
    root.mkdir()
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    files = {name: gzip.decompress(Path(FASHION_MNIST_ROOT, f"{name}-ubyte.gz").read_bytes()) for name in names}
    labels = np.frombuffer(files["train-labels-idx1"][_LABELS_HEADER:], np.uint8).copy()
    rng = np.random.default_rng(SEED)
    planted = rng.permutation(IMAGES)[: IMAGES // 20]
    labels[planted] = (labels[planted] + rng.integers(1, CLASSES, len(planted))) % CLASSES
    files["train-labels-idx1"] = files["train-labels-idx1"][:_LABELS_HEADER] + labels.tobytes()
    for name, content in files.items():
        (root / f"{name}-ubyte").write_bytes(content)
    pixels = np.frombuffer(files["train-images-idx3"][_IMAGES_HEADER:], np.uint8).reshape(IMAGES, -1)
    return pixels, labels, planted


def audited(store: Path, stage: str, name: str, planted: NDArray[np.int64]) -> dict[str, Any]:
    """Return the row of an audit stage."""
    sql = f"SELECT file FROM label_issues WHERE stage = '{stage}' ORDER BY rank"
    files = [row["file"] for row in query(store, sql)]
    found = np.array([int(file.removeprefix("train-")) for file in files])
    (artifact,) = query(store, f"SELECT metrics FROM artifacts WHERE stage = '{stage}'")
    return row(name, found, planted, artifact["metrics"])


def random_features(pixels: NDArray[np.uint8], labels: NDArray[np.uint8], planted: NDArray[np.int64]) -> dict[str, Any]:
    """Return the row of least squares on rectified random projections of the pixels."""
    rng = np.random.default_rng(SEED)
    inputs = pixels.astype(np.float32) / 255
    weights = rng.normal(size=(inputs.shape[1], RANDOM_FEATURES)).astype(np.float32)
    features = np.maximum((inputs - inputs.mean(axis=0)) @ weights, 0)
    given = labels.astype(np.int64)
    probabilities, _ = left_out_probabilities(features, given, CLASSES)
    agreement = float(np.mean(probabilities.argmax(axis=1) == given))
    name = f"leave-one-out: {RANDOM_FEATURES:,} random features of the pixels"
    found = find_issues(given, probabilities).places
    measured = measure_list(given, probabilities, len(found), SEED)
    return row(name, found, planted, measured | {"agreement": agreement})


def row(name: str, found: NDArray[np.int64], planted: NDArray[np.int64], metrics: dict[str, float]) -> dict[str, Any]:
    """Compare a list, the most likely wrong label first, with the planted ones."""
    hits = int(np.isin(found[: len(planted)], planted).sum())
    return {
        "name": name,
        **metrics,
        "listed": len(found),
        "recall": float(np.isin(planted, found).mean()),
        "precision": hits / len(planted),
    }


def page(rows: list[dict[str, Any]], planted: int, load: float) -> list[str]:
    """Return the lines of the page of results."""
    lines = [
        "# Planted wrong labels that an audit finds",
        "",
        f"`python benchmarks/label_audit.py`, {setting(load)}. {planted:,} of Fashion-MNIST's {IMAGES:,} training"
        f" labels (5%) were replaced by one of the other nine classes, seed {SEED}. Precision is the share of planted"
        f" ones among the {planted:,} labels that are listed first; the target is {TARGET}. `agrees with` is the share"
        " of all labels, the planted ones included, that are the model's most likely class.",
        "",
        "| probabilities | agrees with | listed | planted ones among them: found / expected | planted share of the"
        " list: found / expected at most | precision at k = planted |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    return lines + [
        f"| {each['name']} | {each['agreement']:.1%} | {each['listed']:,} |"
        f" {each['recall']:.1%} / {each['flip_recall']:.1%} |"
        f" {each['recall'] * planted / each['listed']:.1%} / {each['expected_precision']:.1%} |"
        f" {each['precision']:.3f} |"
        for each in rows
    ]


if __name__ == "__main__":
    main()
