"""Classify image files with a model artifact, by the preprocessing that its config.json prescribes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vit_model.preprocessing import load_image, normalise
from vit_model.weights import load_model

TOP = 5


def classify(model_folder: Path, images: Sequence[Path]) -> list[dict[str, Any]]:
    """[{"image": path, "top": [{"class": name, "probability": p}, ...]}], the five likeliest classes first.

    Raises:
        ValueError: a file that is no image, or a model without a classifier.
    """
    model, contract = load_model(model_folder)
    if not contract.class_names:
        raise ValueError(f"{model_folder} has no classifier: it gives representations only")
    pixels = np.stack([load_image(image, contract.preprocessing) for image in images])
    with torch.inference_mode():
        logits = model.eval()(normalise(torch.from_numpy(pixels), contract.preprocessing, torch.float32))
    probabilities, classes = logits.float().softmax(-1).topk(min(TOP, logits.shape[-1]))
    return [
        {
            "image": str(image),
            "top": [
                {"class": contract.class_names[label], "probability": probability}
                for probability, label in zip(*both, strict=True)
            ],
        }
        for image, *both in zip(images, probabilities.tolist(), classes.tolist(), strict=True)
    ]
