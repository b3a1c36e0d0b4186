"""What a detector detects in a dataset's images, and the rows of its AP."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ray_jobs.data.boxes import sizes_of
from ray_jobs.data.shards import Dataset
from ray_jobs.detection.average_precision import Detected, average_precisions, match
from ray_jobs.detection.tables import DETECTIONS, detected_of, truths_of
from ray_jobs.process.devices import device, set_threads
from vit_model.detection.detector import load_detector
from vit_model.detection.fcos import detect
from vit_model.preprocessing import normalise

BATCH = 64  # images per forward pass


def detections_of(about: Mapping[str, Any], images: pa.Table, found: pa.Table) -> pa.Table:
    """Return the table of DETECTIONS of a method.

    Args:
        about: its task, protocol, method and draw.
        images: rows of the index, whose boxes these are.
        found: FOUND of each of them.
    """
    columns = {field: [about[field]] * len(images) for field in ("task", "protocol", "method", "draw")}
    columns |= {field: images[field].combine_chunks() for field in ("sample_id", "boxes")}
    columns |= {"found": found["found"].combine_chunks()}
    return pa.table([*columns.values()], names=[*columns]).cast(DETECTIONS)


def measured(detections: pa.Table, num_classes: int) -> Iterator[tuple[str, float]]:
    """Yield AP, AP50, ... of a table of DETECTIONS; a size without boxes is left out."""
    matches = match(truths_of(detections), detected_of(detections), num_classes)
    for metric, value in average_precisions(matches).items():
        if not np.isnan(value):
            yield metric, value


@torch.inference_mode()
def detected_by(folder: Path, dataset: Dataset, rows: pa.Table, threads: int) -> list[Detected]:
    """Return what the detector in a folder detects in these rows of the index, in pixels of the stored images.

    Classes are numbered as in the dataset, which has the same ones in any order.
    """
    set_threads(threads)
    detector, contract = load_detector(folder)
    detector, preprocessing = detector.to(device()), contract.backbone.preprocessing
    labels = np.array([dataset.info.class_names.index(name) for name in contract.class_names])
    side, sizes, made = preprocessing.resolution, sizes_of(rows), list[Detected]()
    decoding = threads if device().type == "cpu" else os.cpu_count() or 1
    for images in dataset.batches(rows, preprocessing, BATCH, decoding):
        outputs = detector(normalise(torch.from_numpy(images).to(device()), preprocessing, torch.float32))
        for found in detect(outputs, detector.places, side, side):
            boxes, scores, classes = (each.cpu().numpy() for each in found)
            scale = np.tile(sizes[len(made)] / side, 2)
            made.append(Detected((boxes * scale).astype(np.float32), scores, labels[classes]))
    return made
