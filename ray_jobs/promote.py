"""The promote stage: is a candidate at least as good as the model that an alias names?

In: a dataset, the candidate, the model that the alias names, if any, and the anchor, if any. Out: `rows.parquet` and
`predictions.parquet` (`ray_jobs.evaluation.rows`) of all of them, and the decision in the artifact's metrics:
`verdict`, `reason`, `accuracy`, `images`, `excluded`, and with a rival `difference`, `lower` and `upper` (with an
anchor also `total`, `total_lower` and `total_upper`). Of detectors, `AP` and detections.parquet instead.

All models are scored on the same test images: those that neither they nor their ancestors were trained on, nor on a
near-copy. The 95% interval of the difference is paired by image (`ray_jobs.evaluation.intervals`,
`ray_jobs.detection.intervals`):

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
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.spec import Promote
from pipelines.store import PROMOTED, Manifest, contract_of, model_folder
from ray_jobs.data.shards import Dataset
from ray_jobs.detection.average_precision import Detected
from ray_jobs.detection.entries import Entry, entries
from ray_jobs.detection.scoring import detected_by
from ray_jobs.detection.tables import FILE as DETECTIONS_FILE
from ray_jobs.detection.tables import detections_of, found_table, measured
from ray_jobs.evaluation import rows as tables
from ray_jobs.evaluation.features import infer
from ray_jobs.evaluation.intervals import FEWEST, Interval, bounds, moments_of, paired_difference, rules_out
from ray_jobs.evaluation.leakage import seen_or_near
from ray_jobs.process.cluster import Run, here, on_cluster
from ray_jobs.process.context import Context, Result
from ray_jobs.process.stage import run_stage
from vit_model.detection.contract import read_detector_contract
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
    return on_cluster(promote, context)


def promote(context: Context[Promote], run: Run = here) -> Result:
    """Score all models on the same images, and decide.

    Raises:
        UserError: the models and the dataset do not have the same classes, or no test image is left.
    """
    config, dataset = context.config, context.dataset(context.config.cache_gib)
    dataset.require("test")
    models = {field: context.inputs[field][0] for field in FIELDS if field in context.inputs}
    names = {"candidate": "candidate", "against": config.against, "anchor": str(config.anchor)}
    _check_classes(context, models, dataset)
    seen, unknown = seen_or_near(context, dataset, [*models.values()])
    index = dataset.index("test").filter(pa.array(~seen))
    if not len(index):
        raise UserError(
            f"data: the models were trained on all {len(seen):,} test images of {config.data}, or on near-copies of"
            f" them. Set `against: [{config.data}]` in the ingest of their training data, and retrain"
        )
    print(f"{len(index):,} test images; {int(seen.sum()):,} left out, which a model has seen", flush=True)
    keys = {model.key: field for field, model in models.items()}  # score a model once, whatever its names
    score = _detections if is_detector(models["candidate"]) else _accuracies
    scored = score(context, {field: keys[model.key] for field, model in models.items()}, names, index, run)
    decision = decide(config, scored.by_field, is_same=_is_same(models))
    print(f"{decision.verdict}: {decision.reason}", flush=True)
    with context.staging() as staging:
        tables.write_table(staging.path / "rows.parquet", scored.rows, tables.ROWS)
        tables.write_predictions(staging.path / "predictions.parquet", scored.predictions)
        if scored.detections:
            tables.write_parquet(staging.path / DETECTIONS_FILE, pa.concat_tables(scored.detections))
    counts = {"images": len(index), "excluded": int(seen.sum())}
    metrics = {"verdict": decision.verdict, "reason": decision.reason} | decision.metrics | counts
    metrics |= {"unknown_training": ", ".join(unknown)} if unknown else {}
    return Result(tables.digest_rows(scored.rows, tables.ROWS), staging.files, metrics)


# ------------------------------------------------------------------------------------------------- the decision


class Accuracy(NamedTuple):
    """A classifier's answers about the test images."""

    correct: NDArray[np.bool_]
    """whether each is right [n]"""
    metric: str = tables.ACCURACY

    @property
    def num_images(self) -> int:
        """The number of test images."""
        return len(self.correct)

    @property
    def value(self) -> float:
        """The accuracy."""
        return float(self.correct.mean())

    def difference(self, rival: Accuracy) -> Interval:
        """Return the difference to a rival's accuracy, with its interval."""
        return paired_difference(self.correct[None], rival.correct[None])

    def tells(self, rival: Accuracy, max_loss: float, images: int) -> bool:
        """Return whether `images` images, differing as often as these, would show which side of -max_loss it is on."""
        moments = moments_of((self.correct - rival.correct.astype(float))[None])
        return rules_out(*bounds(moments._replace(images=images), 0.05, paired=True), max_loss) is not None


class DetectorAP(NamedTuple):
    """A detector's results on the test images."""

    entry: Entry
    metric: str = tables.AP

    @property
    def num_images(self) -> int:
        """The number of test images."""
        return len(self.entry.sample_ids)

    @property
    def value(self) -> float:
        """The AP."""
        return self.entry.means[tables.AP] or 0.0

    def difference(self, rival: DetectorAP) -> Interval:
        """Return the difference to a rival's AP, with its interval."""
        return self.entry.minus(rival.entry, tables.AP)

    def tells(self, rival: DetectorAP, max_loss: float, images: int) -> bool:
        """Return the same as `Accuracy.tells`; an interval is taken to shrink with the root of the images."""
        value, low, high = self.difference(rival)
        scale = (self.num_images / images) ** 0.5
        return rules_out(value - scale * (value - low), value + scale * (high - value), max_loss) is not None


Scored = Accuracy | DetectorAP


def decide(config: Promote, scored: Mapping[str, Scored], is_same: bool = False) -> Decision:
    """Return the decision about a candidate.

    Args:
        scored: field -> the results of its model, all of one kind and on the same images.
        is_same: the candidate is the model that the alias names.
    """
    candidate = scored["candidate"]
    metrics: Metrics = {candidate.metric: candidate.value}
    if "against" not in scored:
        needed = f"{config.against} names no model yet, and the floor is {config.floor:.2%}"
        verdict = PROMOTED if candidate.value >= config.floor else BELOW
        return Decision(verdict, f"the {candidate.metric} is {candidate.value:.2%}; {needed}", metrics)
    judged = []
    for field, max_loss, names in (
        ("against", config.max_loss, ("difference", "lower", "upper")),
        ("anchor", config.max_total_loss, ("total", "total_lower", "total_upper")),
    ):
        if field in scored:
            difference, decision = judge(candidate, scored[field], max_loss, getattr(config, field))
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


def judge(candidate: Any, rival: Any, max_loss: float, name: str) -> tuple[Interval, Decision]:
    """Return the 95% interval of a difference, candidate - rival, and the decision by it alone.

    Args:
        candidate, rival: both `Accuracy`, or both `DetectorAP`.
        name: the rival's.
    """
    difference = candidate.difference(rival)
    value, low, high = (f"{100 * number:+.2f}" for number in difference)
    of_metric = "" if candidate.metric == tables.ACCURACY else f" of {candidate.metric}"
    said = f"{value} points{of_metric} (95% CI {low} to {high}) against {name} on {candidate.num_images:,} images"
    allowed = f"{100 * max_loss:g} points"
    ruled_out = rules_out(difference.low, difference.high, max_loss)
    if ruled_out:
        return difference, Decision(PROMOTED, f"{said}: a loss of {allowed} is ruled out", {})
    if ruled_out is False:
        return difference, Decision(WORSE, f"{said}: more than {allowed} are lost", {})
    needed = images_needed(candidate, rival, max_loss)
    how_many = "more images than a test set has" if needed is None else f"about {needed:,} images"
    reason = f"{said}: a loss of {allowed} is not ruled out; {how_many} would tell"
    return difference, Decision(NOT_SHOWN, reason, {})


def images_needed(candidate: Any, rival: Any, max_loss: float) -> int | None:
    """Return about how many images would show on which side of -max_loss a difference is; None: over MOST_IMAGES.

    The results on these images are taken to be typical.
    """

    def tells(images: int) -> bool:
        told: bool = candidate.tells(rival, max_loss, images)
        return told

    if not tells(MOST_IMAGES):
        return None
    needed = bisect_left(range(MOST_IMAGES), True, lo=candidate.num_images, key=tells)
    return int(float(f"{needed:.1e}"))


# ------------------------------------------------------------------------------------------------- the models


class _Results(NamedTuple):
    """What all models answered."""

    by_field: dict[str, Scored]
    rows: list[tables.Row]
    predictions: list[pa.Table]
    detections: list[pa.Table]


def is_detector(model: Manifest) -> bool:
    """Return whether a model detects objects, and does not classify images."""
    return model.kind == "detector"


def _is_same(models: Mapping[str, Manifest]) -> bool:
    return "against" in models and models["against"].key == models["candidate"].key


def _check_classes(context: Context[Promote], models: Mapping[str, Manifest], dataset: Dataset) -> None:
    """Raise UserError unless all models classify images, or all detect objects, of exactly the dataset's classes."""
    kinds = {field: "finds objects" if is_detector(model) else "classifies images" for field, model in models.items()}
    if len(set(kinds.values())) > 1:
        said = ", ".join(f"{field} {kind}" for field, kind in kinds.items())
        raise UserError(f"{said}: they cannot be compared. Give detectors an alias of their own")
    if dataset.info.multi_label and not is_detector(models["candidate"]):
        raise UserError(f"data: {dataset.info.name} has several labels per image, which no classifier is compared on")
    ours = set(dataset.info.class_names)
    for field, model in models.items():
        where = f"{field}: {model.stage} ({model.job} {model.key[:12]})"
        names, is_multi_label = _classes(context, model)
        theirs = set(names)
        if not theirs or is_multi_label:
            why = "can give several classes" if theirs else "has no classifier"
            raise UserError(f"{where} {why}; fine-tune it first")
        if ours != theirs:
            differences = {f"lacks the classes {_listed(ours - theirs)}": ours - theirs}
            differences |= {f"has the classes {_listed(theirs - ours)}, which {dataset.info.name} lacks": theirs - ours}
            raise UserError(
                f"{where} {' and '.join(text for text, found in differences.items() if found)}: results over different"
                " classes are not comparable. Collect test images of the same classes, or choose the model yourself:"
                " `vitflow alias set`"
            )


def _classes(context: Context[Promote], model: Manifest) -> tuple[tuple[str, ...], bool]:
    """Return the names of a model's classes, and whether an image can have several."""
    if is_detector(model):
        return read_detector_contract(model_folder(context.open_store(), model)).class_names, False
    contract = contract_of(context.open_store(), model)
    assert contract is not None, "a model without a contract"
    return contract.class_names, contract.is_multi_label


def _listed(names: set[str]) -> str:
    most = 5
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(sorted(names)[:most])}{more}"


def _accuracies(
    context: Context[Promote], fields: Mapping[str, str], names: Mapping[str, str], index: pa.Table, run: Run
) -> _Results:
    """Score classifiers on these rows of the index.

    Args:
        fields: field -> the field whose model it is, to score each model once.
        names: field -> what its method is called.
    """
    dataset = context.dataset(context.config.cache_gib)
    truth = tables.Truth(dataset.info.name, index["sample_id"].to_pylist(), index["label"].to_numpy())
    labels = {name: label for label, name in enumerate(dataset.info.class_names)}
    answers = {}
    for field in dict.fromkeys(fields.values()):
        of_model, _ = _classes(context, context.inputs[field][0])
        chosen = np.concatenate(run(predict, _parts(context, field, index)))
        answers[field] = np.array([labels[name] for name in of_model])[chosen]
    results = _Results({}, [], [], [])
    for field, of in fields.items():
        common = {"protocol": PROTOCOL, "method": names[field], "labels_per_class": None, "draw": 0}
        for row, images in tables.scored(common, truth, answers[of], "nothing", {}):
            results.rows.append(row)
            results.predictions.append(images)
            results.by_field[field] = Accuracy(images["correct"].to_numpy())
            print(f"{names[field]}: {row['value']:.2%}", flush=True)
    return results


def _detections(
    context: Context[Promote], fields: Mapping[str, str], names: Mapping[str, str], index: pa.Table, run: Run
) -> _Results:
    """Score detectors, as `_accuracies` does classifiers. Raises UserError if too few images have boxes."""
    dataset = context.dataset(context.config.cache_gib)
    dataset.boxes("test")  # raises if it has none
    found = {
        field: found_table([*chain(*run(detect, _parts(context, field, index)))])
        for field in dict.fromkeys(fields.values())
    }
    results = _Results({}, [], [], [])
    for field, of in fields.items():
        about = {"task": dataset.info.name, "protocol": PROTOCOL, "method": names[field], "draw": 0}
        part = detections_of(about, index, found[of])
        results.detections.append(part)
        common = about | {"labels_per_class": None}
        results.rows.extend(
            tables.measurement(common, metric, value, len(part), "nothing", {})
            for metric, value in measured(part, len(dataset.info.class_names))
        )
        origin = [[text] * len(part) for text in (field, field)]
        (entry,) = entries(pa.table([*origin, *part.columns], names=["artifact", "stage", *part.column_names]))
        if not entry.has_interval:
            raise UserError(f"data: fewer than {FEWEST} of {len(index):,} unseen test images have boxes; collect more")
        results.by_field[field] = DetectorAP(entry)
        print(f"{names[field]}: AP {results.by_field[field].value:.2%}", flush=True)
    return results


def _parts(context: Context[Promote], field: str, index: pa.Table) -> list[tuple[Any, ...]]:
    return [(context, field, index.slice(start, CHUNK)) for start in range(0, len(index), CHUNK)]


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


def detect(context: Context[Promote], field: str, rows: pa.Table) -> list[Detected]:
    """Return what the model detects in these rows of the index (in a Ray task)."""
    return detected_by(context.input(field), context.dataset(context.config.cache_gib), rows, context.config.threads)


if __name__ == "__main__":
    run_stage("promote")
