"""Few-shot evaluation, compared with others: `python benchmarks/fewshot.py`.

Features: those of an S/16 at 224 in float32, from JPEGs of 500 x 375 in a dataset, against the forward pass alone on a
batch in memory. Closed form: three draws of 1, 5, 10 and 25 labels for each of 100 classes, with 768 features and
10,000 test images. L2 is fixed, against scikit-learn's `RidgeClassifier` and big_vision's `fewshot_lsr` in numpy, or
selected by leave-one-out from 26 values, against `RidgeClassifierCV`. All run on one thread and take turns, and a ratio
compares figures of the same round. Before the clock starts, the predictions at the same L2 are compared.

Prints the tables and writes them to benchmarks/results/fewshot.md; takes 6 minutes on two idle cores.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import keep, setting, spread
from numpy.typing import NDArray
from PIL import Image
from sklearn.linear_model import RidgeClassifier, RidgeClassifierCV
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from ray_jobs.data import shards
from ray_jobs.data.columns import Sample
from ray_jobs.data.samples import write_samples
from ray_jobs.evaluation import linear_probe
from ray_jobs.evaluation.features import BATCH, _read, embed
from ray_jobs.evaluation.supports import draw_labels
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract, Preprocessing
from vit_model.model import ViT
from vit_model.preprocessing import normalise

ROUNDS = 5
CLASSES, WIDTH, TEST = 100, 768, 10_000
SHOTS, DRAWS = (1, 5, 10, 25), 3
IMAGES = BATCH  # of the features
Array = NDArray[np.floating]
Classify = Callable[[Array, NDArray[np.integer], Array], NDArray[np.integer]]


def main() -> None:
    """Measure both, print the tables and keep them."""
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    with threadpool_limits(1), tempfile.TemporaryDirectory() as folder:
        lines = [*features(Path(folder)), "", *closed_form()]
    head = [
        "# Few-shot evaluation, compared with others",
        "",
        f"`python benchmarks/fewshot.py`, {setting(load)}, torch {torch.__version__}; one thread; medians (ranges) over"
        f" {ROUNDS} interleaved rounds.",
        "",
    ]
    keep("fewshot.md", [*head, *lines])


def take_turns(contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round; the order alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(ROUNDS):
        for name in contenders if number % 2 == 0 else reversed(contenders):
            began = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def table(seconds: dict[str, list[float]], ours: str, targets: dict[str, str], work: float = 1.0) -> list[str]:
    """Return a table of seconds, or of `work` per second, and of our speedup."""
    lines = [f"| | {'seconds' if work == 1 else 'images/s'} | our speedup | target |", "|---|---:|---:|---|"]
    for name, own in seconds.items():
        values = own if work == 1 else [work / each for each in own]
        ratios = [theirs / mine for theirs, mine in zip(own, seconds[ours], strict=True)]
        faster = "" if name == ours else spread(ratios, 2)
        lines.append(f"| {name} | {spread(values, 2)} | {faster} | {targets.get(name, '')} |")
    return lines


# ------------------------------------------------------------------------------------------------- features


def features(folder: Path) -> list[str]:
    """Time an S/16's features of JPEGs in a dataset, and its forward pass alone."""
    rng = np.random.default_rng(0)
    size = shards.ImageSize(height=375, width=500, channels=3)
    samples = []
    for number in range(IMAGES):
        # smooth, so that its size is that of a photograph
        pixels = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize((500, 375))
        buffer = io.BytesIO()
        pixels.save(buffer, "JPEG", quality=90)
        fields = (str(number), str(number), buffer.getvalue(), "jpeg", size.height, size.width, size.channels)
        samples.append(Sample(*fields, number % 2))
    write_samples(folder, "drawn", ("a", "b"), None, {"test": samples})
    dataset = shards.open_dataset(folder)
    config = ViTConfig.variant("S/16", image_size=224)
    model = ViT(config).eval()
    preprocessing = Preprocessing(resolution=224, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    contract = ModelContract.model_construct(architecture=config, preprocessing=preprocessing)
    numbers, extract = np.arange(IMAGES), partial(embed, model, contract, 1)
    images = torch.from_numpy(dataset.images("test", preprocessing, numbers))
    batch = normalise(images, preprocessing, torch.float32)

    def bare() -> None:
        with torch.inference_mode():
            for part in batch.split(BATCH):
                model.forward_features(part)

    seconds = take_turns(
        {
            "ours, from JPEGs": lambda: _read(dataset, "test", numbers, preprocessing, [extract]),
            "the forward pass alone": bare,
        }
    )
    rows = table(seconds, "ours, from JPEGs", {"the forward pass alone": "ours >= 0.95"}, IMAGES)
    return ["## Features of an S/16 at 224, float32", "", *rows]


# ------------------------------------------------------------------------------------------------- the closed form


def closed_form() -> list[str]:
    """Time the solutions of twelve supports, with L2 fixed and selected."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, WIDTH)).astype(np.float32)
    labels = np.arange(CLASSES * 50) % CLASSES
    train = centres[labels] + 4 * rng.normal(size=(len(labels), WIDTH)).astype(np.float32)
    test = centres[np.arange(TEST) % CLASSES] + 4 * rng.normal(size=(TEST, WIDTH)).astype(np.float32)
    supports = [draw_labels(labels, shots, 0, draw) for shots in SHOTS for draw in range(DRAWS)]

    def solve_all(classify: Classify) -> None:
        for chosen in supports:
            classify(train[chosen], labels[chosen], test)

    largest = supports[-1]
    said = [classify(train[largest], labels[largest], test) for classify in (ours_fixed, ridge, big_vision)]
    agree = [float(np.mean(said[0] == other)) for other in said[1:]]
    fixed = take_turns(
        {
            "ours": partial(solve_all, ours_fixed),
            "RidgeClassifier": partial(solve_all, ridge),
            "big_vision's eigendecomposition": partial(solve_all, big_vision),
        }
    )
    selected = take_turns(
        {"ours": partial(solve_all, ours_selected), "RidgeClassifierCV": partial(solve_all, ridge_selected)}
    )
    return [
        "## Closed form",
        "",
        f"{DRAWS} draws of {', '.join(map(str, SHOTS))} labels for each of {CLASSES} classes, {WIDTH} features,"
        f" {TEST:,} test images.",
        "",
        f"With the same L2, {agree[0]:.2%} of RidgeClassifier's predictions and {agree[1]:.2%} of big_vision's are the"
        " same as ours.",
        "",
        "L2 fixed at 1,024:",
        "",
        *table(fixed, "ours", {"RidgeClassifier": ">= 2", "big_vision's eigendecomposition": ">= 3"}),
        "",
        f"L2 selected by leave-one-out from {len(linear_probe.L2_GRID)} values:",
        "",
        *table(selected, "ours", {"RidgeClassifierCV": ">= 1.5, ideally 2"}),
    ]


def ours_fixed(support: Array, labels: NDArray[np.integer], test: Array) -> NDArray[np.integer]:
    """Predict as `protocol: big_vision` does."""
    return linear_probe.fixed(support, labels, test, True).predictions


def ours_selected(support: Array, labels: NDArray[np.integer], test: Array) -> NDArray[np.integer]:
    """Predict as `protocol: leave_one_out` does."""
    return linear_probe.leave_one_out(support, labels, test, True).predictions


def ridge(support: Array, labels: NDArray[np.integer], test: Array) -> NDArray[np.integer]:
    """Predict as scikit-learn does, in float64 like ours."""
    scaler = StandardScaler().fit(support.astype(np.float64))
    model = RidgeClassifier(alpha=linear_probe.FIXED_L2).fit(scaler.transform(support), labels)
    found: NDArray[np.integer] = model.predict(scaler.transform(test.astype(np.float64)))
    return found


def ridge_selected(support: Array, labels: NDArray[np.integer], test: Array) -> NDArray[np.integer]:
    """Predict with scikit-learn's leave-one-out."""
    scaler = StandardScaler().fit(support.astype(np.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = RidgeClassifierCV(alphas=linear_probe.L2_GRID).fit(scaler.transform(support), labels)
    found: NDArray[np.integer] = model.predict(scaler.transform(test.astype(np.float64)))
    return found


def big_vision(support: Array, labels: NDArray[np.integer], test: Array) -> NDArray[np.integer]:
    """Predict as big_vision's `fewshot_lsr`, in numpy instead of JAX: an eigendecomposition, which gives every L2."""
    support, test = support.astype(np.float64), test.astype(np.float64)
    mean, deviation = support.mean(0), support.std(0) + 1e-5
    x, x_test = (np.hstack([(part - mean) / deviation, np.full((len(part), 1), 100.0)]) for part in (support, test))
    y = 2.0 * np.eye(CLASSES)[labels] - 1.0
    if len(x) >= len(x.T):
        values, vectors = np.linalg.eigh(x.T @ x)
        weights = vectors @ ((vectors.T @ (x.T @ y)) / (values + linear_probe.FIXED_L2)[:, None])
    else:
        values, vectors = np.linalg.eigh(x @ x.T)
        weights = x.T @ (vectors @ ((vectors.T @ y) / (values + linear_probe.FIXED_L2)[:, None]))
    found: NDArray[np.integer] = (x_test @ weights).argmax(1)
    return found


if __name__ == "__main__":
    main()
