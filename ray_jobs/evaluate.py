"""The evaluate stage: few-shot linear evaluation (paper, section 4.1) of a frozen backbone, beside pixels and an
untrained model.

In: a dataset and a model. Out: `rows.parquet` and `predictions.parquet`, see `ray_jobs.evaluation.rows`.

Supports are drawn from train (or from train and dev), and every test image is scored. L2 is selected by leave-one-out
on the support, in the same way for every row. A linear probe does the same with all labels. A model that was trained on
test images is refused (`ray_jobs.evaluation.leakage`).

    python -m ray_jobs.evaluate --spec ATTEMPT.json
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.spec import Evaluate
from ray_jobs.evaluation import rows as tables
from ray_jobs.evaluation.artifact import mean_accuracies, save_evaluation
from ray_jobs.evaluation.leakage import PRETRAINED, SEEN, check_leakage
from ray_jobs.evaluation.linear_probe import few_shot
from ray_jobs.process.devices import fit_resources
from ray_jobs.process.stage import Context, Result, run_stage

PROTOCOL, ALL_LABELS = "few-shot linear", "linear probe"


def main(context: Context[Evaluate]) -> Result:
    """Evaluate in one Ray task."""
    import ray

    resources, _ = fit_resources(context.config.threads)
    task = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(evaluate)
    result: Result = ray.get(task.remote(context))
    return result


def evaluate(context: Context[Evaluate]) -> Result:
    """Compute each kind of features once, then solve every (shots, draw) in closed form.

    Raises:
        UserError: the backbone was trained on test images, see `check_leakage`.
    """
    from ray_jobs.evaluation.features import features_of, labelled_rows, support_of

    config = context.config
    dataset = context.dataset()
    dataset.require("train", "test")
    support = support_of(dataset, config)
    overlap = check_leakage(context, dataset, labelled_rows(dataset, support))
    # A backbone that was trained on these labels is not a few-shot learner.
    backbone = SEEN if overlap.labels_seen else PRETRAINED
    truth, backbone_truth = tables.truth_of(dataset), tables.truth_of(dataset, overlap.seen)
    unlabelled = np.setdiff1d(truth.labels, support.labels)
    if len(unlabelled):
        print(
            f"{len(unlabelled)} classes of test have no labelled images; all their test images count as wrong",
            flush=True,
        )
    rows: list[tables.Row] = []
    predictions = []
    for method, train, test, standardise in features_of(
        dataset, context.input("backbone"), support, config, backbone
    ):
        first_row = len(rows)
        results = few_shot(
            train,
            support.labels,
            test,
            truth.labels,
            shots=config.shots,
            draws=config.draws,
            seed=config.seed,
            standardise=standardise,
            linear_probe=config.linear_probe,
        )
        for result in results:
            common = {
                "protocol": ALL_LABELS if result.shots is None else PROTOCOL,
                "method": method,
                "labels_per_class": result.shots,
                "draw": result.draw,
            }
            settings: dict[str, Any] = {
                "l2": result.l2,
                "standardised": standardise,
                "width": int(train.shape[1]),
            }
            if result.shots is None:
                settings["labelled_images"] = len(support.labels)
            if config.support != "train":
                settings["support"] = config.support
            if checkpoint := config.checkpoints().get("backbone"):
                settings["checkpoint"] = checkpoint
            if config.eval_crop is not None:
                settings["eval_crop"] = config.eval_crop.model_dump()
            if len(unlabelled):
                settings["classes_without_labels"] = len(unlabelled)
            method_truth = backbone_truth if method.endswith(f", {backbone}") else truth
            for row, images in tables.scored(
                common, method_truth, result.predictions, result.selected_on, settings
            ):
                rows.append(row)
                predictions.append(images)
        for name, mean in mean_accuracies(rows[first_row:]).items():
            print(f"{name}: {mean:.3f}", flush=True)
    return save_evaluation(context, rows, predictions, overlap)


if __name__ == "__main__":
    run_stage("evaluate")
