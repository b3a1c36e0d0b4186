"""Few-shot linear evaluation (paper, section 4.1) of a frozen backbone, beside pixels and untrained weights.

In: a dataset and a model. Supports are drawn from train (or from train and dev), every image of test is scored, L2 is
chosen by leave-one-out on the support in the same way for every row; so for all labels of the support at once, which
is a linear probe. A model that was trained on test images is refused first (`ray_jobs.evaluation.leakage`). Out:
`rows.parquet` and `predictions.parquet`, see `ray_jobs.evaluation.rows`.

    python -m ray_jobs.evaluate --spec ATTEMPT.json
"""

from __future__ import annotations

from typing import Any

import numpy as np

# torch and Ray are imported by the functions that need them: the process that reads --spec starts without.
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
    """Features once, then every (shots, draw) in closed form, for each kind of features.

    Raises:
        UserError: the backbone was trained on test images, see `check_leakage`.
    """
    from ray_jobs.evaluation.features import features_of, labelled_rows, support_of

    config = context.config
    dataset = context.dataset()
    dataset.require("train", "test")
    support = support_of(dataset, config)
    overlap = check_leakage(context, dataset, labelled_rows(dataset, support))
    # a backbone that has seen these labels in training is not a few-shot learner
    backbone = SEEN if overlap.labels_seen else PRETRAINED
    truth, of_backbone = tables.truth_of(dataset), tables.truth_of(dataset, overlap.seen)
    unseen = np.setdiff1d(truth.labels, support.labels)
    if len(unseen):
        print(f"{len(unseen)} classes of test have no labelled image: what is theirs is wrong", flush=True)
    rows: list[tables.Row] = []
    predictions = []
    for method, train, test, standardise in features_of(
        dataset, context.input("backbone"), support, config, backbone
    ):
        own = len(rows)
        found = few_shot(
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
        for result in found:
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
            if config.eval_crop is not None:
                settings["eval_crop"] = config.eval_crop.model_dump()
            if len(unseen):
                settings["classes_without_labels"] = len(unseen)
            judged = of_backbone if method.endswith(f", {backbone}") else truth
            for row, images in tables.scored(
                common, judged, result.predictions, result.selected_on, settings
            ):
                rows.append(row)
                predictions.append(images)
        for name, mean in mean_accuracies(rows[own:]).items():
            print(f"{name}: {mean:.3f}", flush=True)
    return save_evaluation(context, rows, predictions, overlap)


if __name__ == "__main__":
    run_stage("evaluate")
