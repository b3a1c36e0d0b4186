"""The promote stage: is a candidate at least as good as the model that an alias names?

In: a dataset, the candidate, the model that the alias names, if any, and the anchor, if any. Out: `rows.parquet` and
`predictions.parquet` (`ray_jobs.evaluation.rows`) of all of them, and the decision in the artifact's metrics:
`verdict`, `reason`, `accuracy`, `images`, `excluded`, and with a rival `difference`, `lower` and `upper` (with an
anchor also `total`, `total_lower` and `total_upper`).

All models are scored on the same test images: those that neither they nor their ancestors were trained on, nor on a
near-copy. The 95% interval of the difference is paired by image (`ray_jobs.evaluation.intervals`):

    promoted              its lower end is above -max_loss, and the same with max_total_loss against the anchor
    worse                 its upper end is below -max_loss (or -max_total_loss)
    not shown             neither: more images could tell
    same                  the candidate is the model that the alias names
    below the floor       the alias names no model, and the accuracy is below `floor`

    python -m ray_jobs.promote --spec ATTEMPT.json
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.spec import Promote
from pipelines.store import PROMOTED, Manifest, contract_of
from ray_jobs.data.shards import Dataset
from ray_jobs.evaluation import rows as tables
from ray_jobs.evaluation.features import infer
from ray_jobs.evaluation.intervals import Interval, bounds, moments_of, paired_difference, rules_out
from ray_jobs.evaluation.leakage import seen_or_near
from ray_jobs.process.cluster import Run, here, on_cluster
from ray_jobs.process.context import Context, Result
from ray_jobs.process.stage import run_stage
from vit_model.contract import ModelContract
from vit_model.errors import UserError

WORSE, NOT_SHOWN, SAME, BELOW = "worse", "not shown", "same", "below the floor"
PROTOCOL = "promotion"
FIELDS = ("candidate", "against", "anchor")
CHUNK = 8192  # images per task
MOST_IMAGES = 10**9  # beyond which no test set can be collected


Metrics = dict[str, float | int | str]


class Decision(NamedTuple):
    """A verdict, why, and the numbers behind it."""

    verdict: str
    reason: str
    metrics: Metrics


def main(context: Context[Promote]) -> Result:
    """Compare in one Ray task, which scores in other tasks."""
    result: Result = on_cluster(promote, context)
    return result


def promote(context: Context[Promote], run: Run = here) -> Result:
    """Score all models on the same images, and decide.

    Raises:
        UserError: the models and the dataset do not have the same classes, or no test image is left.
    """
    config, dataset = context.config, context.dataset(context.config.cache_gib)
    dataset.require("test")
    models = {field: context.inputs[field][0] for field in FIELDS if field in context.inputs}
    names = {"candidate": "candidate", "against": config.against, "anchor": str(config.anchor)}
    for field, model in models.items():
        _check_classes(f"{field}: {model.stage} ({model.job} {model.key[:12]})", _contract(context, model), dataset)
    seen, unknown = seen_or_near(context, dataset, [*models.values()])
    index = dataset.index("test").filter(pa.array(~seen))
    if not len(index):
        raise UserError(
            f"data: the models were trained on all {len(seen):,} test images of {config.data}, or on near-copies of"
            f" them. Set `against: [{config.data}]` in the ingest of their training data, and retrain"
        )
    print(f"{len(index):,} test images; {int(seen.sum()):,} left out, which a model has seen", flush=True)
    truth = tables.Truth(dataset.info.name, index["sample_id"].to_pylist(), index["label"].to_numpy())
    keys = {model.key: field for field, model in models.items()}  # score a model once, whatever its names
    predicted = {key: _predictions(context, field, index, run) for key, field in keys.items()}
    rows, predictions = [], []
    correct: dict[str, NDArray[np.bool_]] = {}
    for field, model in models.items():
        common = {"protocol": PROTOCOL, "method": names[field], "labels_per_class": None, "draw": 0}
        for row, images in tables.scored(common, truth, predicted[model.key], "nothing", {}):
            rows.append(row)
            predictions.append(images)
            correct[field] = images["correct"].to_numpy()
            print(f"{names[field]}: {row['value']:.2%}", flush=True)
    decision = decide(config, correct, is_same="against" in models and models["against"].key == models["candidate"].key)
    print(f"{decision.verdict}: {decision.reason}", flush=True)
    with context.staging() as staging:
        tables.write_table(staging.path / "rows.parquet", rows, tables.ROWS)
        tables.write_predictions(staging.path / "predictions.parquet", predictions)
    counts = {"images": len(index), "excluded": int(seen.sum())}
    metrics = {"verdict": decision.verdict, "reason": decision.reason} | decision.metrics | counts
    metrics |= {"unknown_training": ", ".join(unknown)} if unknown else {}
    return Result(tables.digest_rows(rows, tables.ROWS), staging.files, metrics)


# ------------------------------------------------------------------------------------------------- the decision


def decide(config: Promote, correct: Mapping[str, NDArray[np.bool_]], is_same: bool = False) -> Decision:
    """Return the decision about a candidate.

    Args:
        correct: field -> whether its model has each image right, [n], the same images for all.
        is_same: the candidate is the model that the alias names.
    """
    accuracy = float(correct["candidate"].mean())
    metrics: Metrics = {"accuracy": accuracy}
    if "against" not in correct:
        needed = f"{config.against} names no model yet, and the floor is {config.floor:.2%}"
        verdict = PROMOTED if accuracy >= config.floor else BELOW
        return Decision(verdict, f"the accuracy is {accuracy:.2%}; {needed}", metrics)
    judged = []
    for field, max_loss, names in (
        ("against", config.max_loss, ("difference", "lower", "upper")),
        ("anchor", config.max_total_loss, ("total", "total_lower", "total_upper")),
    ):
        if field in correct:
            difference, decision = judge(correct["candidate"], correct[field], max_loss, getattr(config, field))
            metrics |= zip(names, difference, strict=True)
            judged.append(decision)
    if is_same:
        return Decision(SAME, f"the candidate is the model that {config.against} names", metrics)
    refused = [each for each in judged if each.verdict != PROMOTED]
    # a shown loss says more than a missing proof
    worst = next((each for each in refused if each.verdict == WORSE), refused[0] if refused else None)
    if worst is not None:
        return worst._replace(metrics=metrics)
    return Decision(PROMOTED, "; ".join(each.reason for each in judged), metrics)


def judge(
    candidate: NDArray[np.bool_], rival: NDArray[np.bool_], max_loss: float, name: str
) -> tuple[Interval, Decision]:
    """Return the 95% interval of a difference of accuracies, candidate - rival, and the decision by it alone.

    Args:
        candidate, rival: whether each image is right, [n].
        name: the rival's.
    """
    difference = paired_difference(candidate[None], rival[None])
    value, low, high = (f"{100 * number:+.2f}" for number in difference)
    measured = f"{value} points (95% CI {low} to {high}) against {name} on {len(rival):,} images"
    allowed = f"{100 * max_loss:g} points"
    ruled_out = rules_out(difference.low, difference.high, max_loss)
    if ruled_out:
        return difference, Decision(PROMOTED, f"{measured}: a loss of {allowed} is ruled out", {})
    if ruled_out is False:
        return difference, Decision(WORSE, f"{measured}: more than {allowed} are lost", {})
    needed = images_needed(candidate, rival, max_loss)
    how_many = "more images than a test set has" if needed is None else f"about {needed:,} images"
    reason = f"{measured}: a loss of {allowed} is not ruled out; {how_many} would tell"
    return difference, Decision(NOT_SHOWN, reason, {})


def images_needed(candidate: NDArray[np.bool_], rival: NDArray[np.bool_], max_loss: float) -> int | None:
    """Return about how many images would show on which side of -max_loss a difference is; None: over MOST_IMAGES.

    The shares of images that only one of the models has right are taken to stay as they are.
    """
    moments = moments_of((candidate - rival.astype(float))[None])

    def tells(images: int) -> bool:
        return rules_out(*bounds(moments._replace(images=images), 0.05, paired=True), max_loss) is not None

    if not tells(MOST_IMAGES):
        return None
    needed = bisect_left(range(MOST_IMAGES), True, lo=len(rival), key=tells)
    return int(float(f"{needed:.1e}"))


# ------------------------------------------------------------------------------------------------- the models


def _contract(context: Context[Promote], model: Manifest) -> ModelContract:
    contract = contract_of(context.open_store(), model)
    assert contract is not None, "a model without a contract"
    return contract


def _check_classes(where: str, contract: ModelContract, dataset: Dataset) -> None:
    """Raise UserError if a model does not choose one of exactly the dataset's classes."""
    ours, theirs = set(dataset.info.class_names), set(contract.class_names)
    if not theirs or contract.is_multi_label:
        raise UserError(f"{where} {'can give several classes' if theirs else 'has no classifier'}; fine-tune it first")
    if ours != theirs:
        differences = {f"lacks the classes {_listed(ours - theirs)}": ours - theirs}
        differences |= {f"has the classes {_listed(theirs - ours)}, which {dataset.info.name} lacks": theirs - ours}
        raise UserError(
            f"{where} {' and '.join(text for text, names in differences.items() if names)}: accuracies over different"
            f" classes are not comparable. Collect test images of the same classes, or choose the model yourself:"
            " `vitflow alias set`"
        )


def _listed(names: set[str]) -> str:
    most = 5
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(sorted(names)[:most])}{more}"


def _predictions(context: Context[Promote], field: str, index: pa.Table, run: Run) -> NDArray[np.int64]:
    """Return a model's predictions [n] of these rows of the index, as labels of the dataset."""
    tasks = [
        (context, field, index.take(np.arange(start, min(start + CHUNK, len(index)))))
        for start in range(0, len(index), CHUNK)
    ]
    chosen = np.concatenate(run(predict, tasks))
    names = context.dataset(context.config.cache_gib).info.class_names
    labels = {name: label for label, name in enumerate(names)}
    contract = _contract(context, context.inputs[field][0])
    return np.array([labels[name] for name in contract.class_names])[chosen]


def predict(context: Context[Promote], field: str, rows: pa.Table) -> NDArray[np.int64]:
    """Return the likeliest classes [n] of these rows of the index, as the model numbers them (in a Ray task).

    Raises:
        UserError: an output of the model is not finite.
    """
    dataset = context.dataset(context.config.cache_gib)
    values = infer(context.input(field), dataset, rows, context.config.threads, True)
    if not np.isfinite(values).all():
        raise UserError(f"{field}: the model's output is not finite")
    likeliest: NDArray[Any] = values.argmax(axis=1)
    return likeliest


if __name__ == "__main__":
    run_stage("promote")
