"""Boxes and detections of images as columns of tables, and as `average_precision.match` takes them; their AP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_jobs.data.boxes import BOX, of_rows
from ray_jobs.detection.average_precision import Boxes, Detected, average_precisions, match
from ray_jobs.evaluation.rows import PREDICTIONS, Row, filled

FILE = "detections.parquet"
_FIELDS = ("x1", "y1", "x2", "y2", "score", "label")
_DETECTION = pa.struct([pa.field(name, pa.int32() if name == "label" else pa.float32(), False) for name in _FIELDS])
FOUND = pa.schema([pa.field("found", pa.list_(pa.field("element", _DETECTION, False)), False)])
"""The detections in an image, by descending score, in its pixels."""
DETECTIONS = pa.schema(
    [
        *(PREDICTIONS.field(name) for name in ("task", "protocol", "method", "draw", "sample_id")),
        pa.field("boxes", pa.list_(pa.field("element", BOX, False)), False),
        *FOUND,
    ]
)
"""FILE: the boxes and the detections of each test image, from which AP can be computed again."""


def truths_of(images: pa.Table) -> list[Boxes]:
    """Return the boxes of images, from a table with the column `boxes`."""
    return [
        Boxes(
            _array([box[:4] for box in boxes]),
            np.array([box.label for box in boxes], np.int64),
            np.array([box.ignored for box in boxes], bool),
        )
        for boxes in of_rows(images)
    ]


def detected_of(images: pa.Table) -> list[Detected]:
    """Return the detections in images, from a table with the column `found`."""
    return [
        Detected(
            _array([[each[name] for name in _FIELDS[:4]] for each in found]),
            np.array([each["score"] for each in found], np.float64),
            np.array([each["label"] for each in found], np.int64),
        )
        for found in images["found"].to_pylist()
    ]


def found_table(detected: Sequence[Detected]) -> pa.Table:
    """Return the table of detections in images, FOUND."""
    rows: list[list[dict[str, Any]]] = [
        [
            dict(zip(_FIELDS, (*box, score, label), strict=True))
            for box, score, label in zip(*(part.tolist() for part in each), strict=True)
        ]
        for each in detected
    ]
    return pa.table([rows], schema=FOUND)


def detections_of(about: Row, images: pa.Table, found: pa.Table) -> pa.Table:
    """Return the table of DETECTIONS of a method.

    Args:
        about: its task, protocol, method and draw.
        images: rows of the index, whose boxes these are.
        found: FOUND of each of them.
    """
    columns = {field: images[field].combine_chunks() for field in ("sample_id", "boxes")}
    return filled(DETECTIONS, columns | {"found": found["found"].combine_chunks()}, about, len(images))


def measured(detections: pa.Table, num_classes: int) -> Iterator[tuple[str, float]]:
    """Yield AP, AP50, ... of a table of DETECTIONS; a size without boxes is left out."""
    matches = match(truths_of(detections), detected_of(detections), num_classes)
    for metric, value in average_precisions(matches).items():
        if not np.isnan(value):
            yield metric, value


def _array(boxes: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    return np.array(boxes, np.float64).reshape(-1, 4)
