"""What a detector of the store detects in a dataset's images."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ray_jobs.data.boxes import sizes_of
from ray_jobs.data.shards import Dataset
from ray_jobs.detection.average_precision import Detected
from ray_jobs.process.devices import device, set_threads
from vit_model.detection.detector import load_detector
from vit_model.detection.fcos import detect
from vit_model.preprocessing import normalise

BATCH = 64  # images per forward pass


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
