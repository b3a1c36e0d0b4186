"""Classify image files, or their pixels, with a model artifact and the preprocessing in its config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from vit_model.build import Network
from vit_model.contract import ModelContract
from vit_model.errors import UserError
from vit_model.preprocessing import decode_image, load_image, normalise
from vit_model.weights import load_model

TOP = 5
BATCH = 64  # images in memory at once


def classify(model_folder: Path, images: Sequence[Path]) -> list[dict[str, Any]]:
    """Return [{"image": path, "top": [{"class": name, "probability": p}, ...]}] with the five most likely classes.

    If an image can have several classes (the contract's problem_type), the probabilities do not add up to 1, each class
    has its "threshold" (0.5 without any), "classes" has the names of those that reach theirs, and "top" these, too, if
    they are more.

    Raises:
        UserError: a file is not an image, or the model has no classifier.
    """
    rows = list(classify_readable(*load_model(model_folder), images))
    for row in rows:
        if "error" in row:
            raise UserError(row["error"])
    return rows


def classify_readable(model: Network, contract: ModelContract, images: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield what `classify` returns, but {"image": path, "error": reason} for a file that cannot be read.

    Raises:
        UserError: the model has no classifier.
    """
    _require_classifier(contract)
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        pixels: dict[Path, NDArray[np.uint8]] = {}
        errors: dict[Path, str] = {}
        for image in batch:
            try:
                pixels[image] = load_image(image, contract.preprocessing)
            except (UserError, OSError) as error:
                errors[image] = str(error)
        stacked = np.stack(list(pixels.values())) if pixels else np.zeros((0, 1, 1, 1), np.uint8)
        answers = dict(zip(pixels, answer(model, contract, stacked), strict=True))
        for image in batch:
            yield {"image": str(image)} | (answers[image] if image in answers else {"error": errors[image]})


@torch.inference_mode()
def segment_readable(
    model: Network, contract: ModelContract, images: Sequence[Path]
) -> Iterator[tuple[dict[str, Any], NDArray[np.uint8]]]:
    """Yield each image's {"image": path, "pixels": [{"class", "share"}]} and its mask, uint8 [height, width].

    The mask has the upright image's size and the numbers of classes; shares descend. A file that cannot be read gives
    {"image": path, "error": reason} and an empty mask.
    """
    preprocessing, names = contract.preprocessing, contract.mask_classes
    for image in images:
        try:
            whole = decode_image(image, preprocessing.channels)
            pixels = load_image(whole, preprocessing)
        except (UserError, OSError) as error:
            yield {"image": str(image), "error": str(error)}, np.zeros((0, 0), np.uint8)
            continue
        logits = model(normalise(torch.from_numpy(pixels)[None], preprocessing, torch.float32))
        best = torch.full(whole.shape[:2], -math.inf)
        mask = torch.zeros(whole.shape[:2], dtype=torch.uint8)
        for number, scores in enumerate(logits[0]):  # one after the other, because photographs are large
            large = functional.interpolate(scores[None, None], best.shape, mode="bilinear")[0, 0]
            mask[large > best] = number
            best = torch.maximum(best, large)
        shares = np.bincount(mask.numpy().ravel(), minlength=len(names)) / mask.numel()
        found = sorted(zip(names, shares.tolist(), strict=True), key=lambda each: -each[1])
        yield {"image": str(image), "pixels": [{"class": name, "share": share} for name, share in found]}, mask.numpy()


def answer(model: Network, contract: ModelContract, pixels: NDArray[np.uint8]) -> list[dict[str, Any]]:
    """Return what `classify` returns for each image, without its path.

    Args:
        pixels: [n, resolution, resolution, channels], preprocessed as the contract says.

    Raises:
        UserError: the model has no classifier.
    """
    _require_classifier(contract)
    if not len(pixels):
        return []
    with torch.inference_mode():
        logits = model.eval()(normalise(torch.from_numpy(pixels), contract.preprocessing, torch.float32))
    several = contract.is_multi_label
    probabilities = logits.float().sigmoid() if several else logits.float().softmax(-1)
    thresholds = contract.thresholds or (0.5 if several else math.inf,) * len(contract.class_names)
    reached = probabilities.cpu() >= torch.tensor(thresholds, dtype=torch.float64)
    values, classes = probabilities.topk(logits.shape[-1] if several else min(TOP, logits.shape[-1]))
    answers: list[dict[str, Any]] = [
        {
            "top": [
                {"class": contract.class_names[label], "probability": probability}
                | ({"threshold": thresholds[label]} if several else {})
                for rank, (probability, label) in enumerate(zip(*both, strict=True))
                if rank < TOP or is_reached[label]
            ]
        }
        for *both, is_reached in zip(values.tolist(), classes.tolist(), reached.tolist(), strict=True)
    ]
    if several:
        for found, image in zip(answers, reached, strict=True):
            found["classes"] = [contract.class_names[label] for label in image.nonzero().flatten().tolist()]
    return answers


def _require_classifier(contract: ModelContract) -> None:
    if contract.mask_classes:
        raise UserError(f"the model classifies pixels ({', '.join(contract.mask_classes)}), not images")
    if not contract.class_names:
        raise UserError("the model has no classifier, only representations; fine-tune it first")
