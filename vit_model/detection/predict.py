"""Detect objects in image files with a detector artifact and the preprocessing in its config.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vit_model.detection.contract import DetectorContract
from vit_model.detection.detector import Detector
from vit_model.detection.fcos import detect
from vit_model.errors import UserError
from vit_model.preprocessing import decode_image, load_image, normalise


@torch.inference_mode()
def detect_readable(detector: Detector, contract: DetectorContract, images: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield {"image": path, "objects": [{"class", "score", "bbox"}]} for each image, by descending score.

    A `bbox` is x, y, width and height in pixels of the upright image, as COCO's results have it. A file that cannot be
    read gives {"image": path, "error": reason}.
    """
    preprocessing = contract.backbone.preprocessing
    side = preprocessing.resolution
    for image in images:
        try:
            whole = decode_image(image, preprocessing.channels)
            pixels = load_image(whole, preprocessing)
        except (UserError, OSError) as error:
            yield {"image": str(image), "error": str(error)}
            continue
        inputs = normalise(torch.from_numpy(pixels)[None], preprocessing, torch.float32)
        (found,) = detect(detector(inputs), detector.places, side, side)
        height, width = whole.shape[:2]
        boxes = found.boxes.numpy().astype(float) * np.array([width, height] * 2) / side
        boxes[:, 2:] -= boxes[:, :2]
        yield {
            "image": str(image),
            "objects": [
                {"class": contract.class_names[label], "score": score, "bbox": box}
                for box, score, label in zip(boxes.tolist(), found.scores.tolist(), found.classes.tolist(), strict=True)
            ],
        }
