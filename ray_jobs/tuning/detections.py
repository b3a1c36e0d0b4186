"""The results of a detection: rows with COCO's AP, and detections.parquet with the boxes and detections of each image.

Every test image has its boxes and what each refit detected in it, in its pixels, so that AP, with its interval, can be
computed again from this file alone. Beside the refits stands a detector that says the same about every image: the
most frequent class of train, at the median of its boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ray_jobs.data.boxes import sizes_of
from ray_jobs.data.shards import Dataset
from ray_jobs.detection.average_precision import Detected
from ray_jobs.detection.tables import FILE, detections_of, found_table, measured
from ray_jobs.evaluation import rows
from ray_jobs.evaluation.leakage import PRETRAINED, Overlap
from ray_jobs.training.task import Task
from ray_jobs.tuning.trial import Refitted
from vit_model.variants import FAMILIES

PROTOCOL = "detection"


def tables(
    task: Task,
    dataset: Dataset,
    refits: Sequence[Refitted],
    selected_on: str,
    settings: dict[str, Any],
    overlap: Overlap,
) -> tuple[list[rows.Row], list[pa.Table], dict[str, list[pa.Table]]]:
    """Return the rows of rows.parquet, no predictions of classes, and the tables of detections.parquet."""
    test = dataset.index("test")
    start = "from scratch" if task.backbone is None else PRETRAINED
    frozen = ", frozen" if task.config.freeze == "backbone" else ""
    method = f"{FAMILIES[task.contract.architecture.family]}, {start}{frozen}"
    named = [(method, draw, done.images) for draw, done in enumerate(refits)]
    named.append((rows.MEDIAN_BOX, 0, _median_box(dataset)))
    made: list[rows.Row] = []
    parts: list[pa.Table] = []
    for name, draw, found in named:
        is_refit = name == method
        common = {"protocol": PROTOCOL, "labels_per_class": None, "draw": draw}
        scoring = [(dataset.info.name, np.arange(len(test)), np.arange(len(test)))]
        for title, of_part, places, _ in rows.split_by_seen(scoring, name, overlap.seen if is_refit else None):
            about = common | {"task": title, "method": of_part}
            part = detections_of(about, test.take(places), found.take(places))
            how = (selected_on, settings) if is_refit else ("nothing", {})
            found_values = measured(part, len(task.objects))
            made += (rows.measurement(about, metric, value, len(part), *how) for metric, value in found_values)
            parts.append(part)
    return made, [], {FILE: parts}


def _median_box(dataset: Dataset) -> pa.Table:
    """Return one detection for each test image: the most frequent class of train, at the median of its boxes."""
    sizes = {split: np.tile(sizes_of(dataset.index(split)), 2) for split in ("train", "test")}
    boxes = [[box for box in some if not box.ignored] for some in dataset.boxes("train")]
    labels = np.array([box.label for some in boxes for box in some], np.int64)
    if not len(labels):
        return found_table([Detected(np.zeros((0, 4)), np.zeros(0), labels)] * len(sizes["test"]))
    label = int(np.bincount(labels).argmax())
    shares = [box[:4] / size for some, size in zip(boxes, sizes["train"], strict=True) for box in some]
    median = np.median(np.array(shares)[labels == label], axis=0)
    return found_table([Detected((median * size)[None], np.ones(1), np.array([label])) for size in sizes["test"]])
