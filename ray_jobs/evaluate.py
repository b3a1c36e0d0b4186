"""The evaluate stage: few-shot linear evaluation (paper, section 4.1) of a frozen backbone, and the same on pixels,
untrained models and the most frequent class.

In: a dataset and a model. Out: `rows.parquet` and `predictions.parquet` (`ray_jobs.evaluation.rows`), the features that
no earlier evaluation has (`ray_jobs.evaluation.features`), and cost.json (`ray_jobs.evaluation.cost`).

Supports are drawn from train (or from train and dev), and every test image is scored. The stage's `protocol` says how
labels are drawn and L2 is chosen, the same for every row. A linear probe does the same with all labels. With
`retrieval`, each test image is also a query among the others (`ray_jobs.evaluation.metrics`). A model that
was trained on test images is refused (`ray_jobs.evaluation.leakage`).

    python -m ray_jobs.evaluate --spec ATTEMPT.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.spec import Evaluate, quantity
from ray_jobs.evaluation import rows as tables
from ray_jobs.evaluation.artifact import mean_values, save_evaluation
from ray_jobs.evaluation.cost import write_cost
from ray_jobs.evaluation.leakage import PRETRAINED, SEEN, check_leakage
from ray_jobs.evaluation.metrics import retrieval
from ray_jobs.process.cluster import Run, here, on_cluster
from ray_jobs.process.context import Context, Result
from ray_jobs.process.stage import run_stage

if TYPE_CHECKING:
    from ray_jobs.evaluation import frozen

RETRIEVAL = "retrieval"


def main(context: Context[Evaluate]) -> Result:
    """Evaluate in one Ray task, which computes features in other tasks."""
    return on_cluster(evaluate, context)


def evaluate(context: Context[Evaluate], run: Run = here) -> Result:
    """Compute each kind of features once, then solve every (shots, draw).

    Raises:
        UserError: the backbone was trained on test images, see `check_leakage`.
    """
    from ray_jobs.evaluation import features, frozen

    config = context.config
    dataset = context.dataset()
    dataset.require("train", "test")
    if config.protocol == "dev":
        dataset.require("dev")
    support = features.support_of(dataset, config)
    overlap = check_leakage(context, dataset, features.labelled_rows(dataset, support))
    # A backbone that was trained on these labels is not a few-shot learner.
    backbone = SEEN if overlap.labels_seen else PRETRAINED
    truth, backbone_truth = tables.truth_of(dataset), tables.truth_of(dataset, overlap.seen)
    unlabelled = np.setdiff1d(truth.labels, support.labels)
    if len(unlabelled):
        print(
            f"{quantity(len(unlabelled), 'class', 'classes')} of test without labelled images: all test images of"
            " such classes count as wrong",
            flush=True,
        )
    image_settings = _image_settings(config)
    fixed = image_settings | _label_settings(config, len(unlabelled))
    dev = np.flatnonzero(support.splits == "dev")
    rows: list[tables.Row] = []
    predictions: list[Any] = []

    def add(method: str, method_truth: tables.Truth, result: frozen.Result, settings: dict[str, Any]) -> None:
        if result.shots is None:
            settings = settings | {"labelled_images": len(support.labels)}
        for row, images in _scored(method, method_truth, result, settings):
            rows.append(row)
            predictions.append(images)

    with context.staging() as staging:
        for method, pairs, standardise in features.features_of(context, dataset, support, backbone, run, staging.path):
            first_row = len(rows)
            method_truth = backbone_truth if method.endswith(f", {backbone}") else truth
            settings = fixed | {"standardised": standardise, "width": int(pairs[0][0].shape[1])}
            for result in frozen.results(config, pairs, support.labels, truth.labels, standardise, dev):
                seed = {"initialisation": config.seed + result.draw % len(pairs)} if len(pairs) > 1 else {}
                add(method, method_truth, result, settings | seed)
            # cosine similarities are computed on features that are not standardised
            if config.retrieval and method != features.PIXELS_STANDARDISED:
                for draw, (_, test) in enumerate(pairs):
                    rows += _retrieval(method, draw, test, method_truth, truth.labels, image_settings)
            for name, mean in mean_values(rows[first_row:]).items():
                print(f"{name}: {mean:.3f}", flush=True)
        for result in frozen.most_frequent(config, support.labels, len(truth.labels)):
            add(tables.MOST_FREQUENT, truth, result, fixed)
        [cost] = run(features.cost_of_features, [(context,)])
        write_cost(staging.path, cost)
    return save_evaluation(context, rows, predictions, overlap, staging.files)


def _scored(
    method: str, truth: tables.Truth, result: frozen.Result, settings: dict[str, Any]
) -> Iterator[tuple[tables.Row, Any]]:
    """Yield the rows of a classifier, each with its predictions."""
    fitted = result.fitted
    common = {
        "protocol": result.protocol,
        "method": method + (tables.CHOSEN_ON_TEST if fitted.selected_on == "test" else ""),
        "labels_per_class": result.shots,
        "draw": result.draw,
    }
    settings = settings | fitted.settings
    yield from tables.scored(common, truth, fitted.predictions, fitted.selected_on, settings, fitted.probabilities)


def _retrieval(
    method: str,
    draw: int,
    test: NDArray[np.float32],
    truth: tables.Truth,
    labels: NDArray[np.int64],
    settings: dict[str, Any],
) -> Iterator[tables.Row]:
    """Yield the rows of retrieval by the features [n, d] of the test images: the mean over those with an answer."""
    common = {"protocol": RETRIEVAL, "labels_per_class": None, "draw": draw}
    settings, values = {"width": int(test.shape[1])} | settings, retrieval(test, labels)
    places = np.flatnonzero(~np.isnan(values))
    for task, name, _, part in tables.split_by_seen([(truth.task, places, values[places])], method, truth.seen):
        if len(part):
            about, mean = common | {"task": task, "method": name}, float(part.mean())
            yield tables.measurement(about, tables.MEAN_AP, mean, len(part), "nothing", settings)


def _image_settings(config: Evaluate) -> dict[str, Any]:
    """Return the settings of all kinds of features."""
    settings: dict[str, Any] = {}
    if checkpoint := config.checkpoints().get("backbone"):
        settings["checkpoint"] = checkpoint
    if config.eval_crop is not None:
        settings["eval_crop"] = config.eval_crop.model_dump(exclude_none=True)
    if config.resolution is not None:
        settings["resolution"] = config.resolution
    return settings


def _label_settings(config: Evaluate, unlabelled: int) -> dict[str, Any]:
    """Return the settings of all classifiers."""
    settings: dict[str, Any] = {} if config.support == "train" else {"support": config.support}
    if unlabelled:
        settings["classes_without_labels"] = unlabelled
    return settings


if __name__ == "__main__":
    run_stage("evaluate")
