"""What the first screen of the page shows beside the answer: comparisons, power, trust, cost, and the model to use.

In: the lines of report.json. Out: texts and plain dictionaries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from pipelines.spec import WEIGHTS, quantity
from ray_jobs.evaluation.rows import ACCURACY, AP, CHOSEN_ON_TEST, MEAN_AP, MEAN_IOU
from ray_jobs.reporting.answer import Line, settings
from ray_jobs.reporting.drawing.pictures import FEW, FEW_DEV
from ray_jobs.reporting.studies import on_test
from ray_jobs.reporting.verdicts import points, quoted

FEW_TO_PRETRAIN = 10_000  # images; as for init, which says that a model of its own will be weak
SHOWN = 4  # groups of comparisons; the others are folded


def first_screen(numbers: Line) -> dict[str, Any]:
    """Return what the first screen shows beside the answer: groups, power, trust, cost, and the model to use."""
    groups = settings(numbers["verdicts"])
    return {
        "compared": [_rows(group, numbers) for group in groups],
        "power": power([group[0] for group in groups]),
        "trust": trust(numbers),
        "cost": cost(numbers["stages"], numbers["environments"]),
        "model": model(numbers),
    }


def _rows(group: Sequence[Line], numbers: Line) -> dict[str, Any]:
    """Return a group's heading and its methods, the best first; each reference has its comparison."""
    first = group[0]
    labels, task, metric = first["labels_per_class"], first["task"], first["metric"]
    lines = {
        (line["artifact"], line["method"], line["labels_per_class"], line["protocol"], line["task"]): line
        for line in on_test(numbers)
        if line["metric"] == metric
    }
    judged = lines[first["artifact"], first["method"], labels, first["protocol"], task]
    rows: list[dict[str, Any]] = [{"line": judged, "verdict": None}]
    for verdict in group:
        key = verdict["reference_artifact"], verdict["reference"], labels, verdict["reference_protocol"], task
        rows.append({"line": lines[key], "verdict": verdict})
    return {
        "task": task,
        "labels": first["labels"],
        "metric": metric,
        "unknown": first["unknown_training"],
        "rows": sorted(rows, key=lambda row: -row["line"]["value"]),
    }


def power(strongest: Sequence[Line]) -> str:
    """Say which differences these test images are enough to detect; empty without comparisons."""
    parts: dict[str, list[float]] = {}
    for verdict in strongest:
        draws = f"{quantity(verdict['draws'], 'draw')} of " if verdict["draws"] > 1 else ""
        images = f"{draws}{verdict['labels'].partition(' (')[0]} and {verdict['num_images']:,} test images"
        parts.setdefault(images, []).append(verdict["detectable"])
    if not 0 < len(parts) <= SHOWN:
        return ""
    sizes = ", or of ".join(
        f"{' to '.join(dict.fromkeys(points(end(some), sign='') for end in (min, max)))} points with {images}"
        for images, some in parts.items()
    )
    return f"A true difference of {sizes} is detected with a probability of 80%, a smaller one less often."


def trust(numbers: Line) -> list[dict[str, Any]]:
    """Return what speaks for and against the numbers: {text, is_good}."""
    is_scored = numbers["accuracies"] or numbers.get("other_metrics") or numbers.get("detectors")
    notes = list(_leakage(numbers["stages"])) if is_scored else []
    for dataset in numbers["datasets"]:
        if left_out := dataset["quarantined"]:
            were = "was" if left_out == 1 else "were"
            images = f"{quantity(left_out, 'image')} could not be used and {were} left out"
            notes.append((f"{dataset['name']}: {images}.", False))
        if is_scored and not numbers["vtab"]:  # whose data sets are given, and many
            on_dev = any(
                line["task"] == dataset["name"] and str(settings.get("thresholds")).startswith("dev")
                for line in numbers.get("other_metrics", ())
                for settings in line["settings"]
            )
            problems = _label_problems(dataset, has_thresholds=on_dev)
            notes += [(f"{dataset['name']}: {problem}.", False) for problem in problems]
    if any(CHOSEN_ON_TEST in line["method"] for line in numbers["accuracies"]):
        notes.append(("Some settings were chosen on test; these methods say so.", False))
    if groups := numbers.get("embeddings"):
        some = " and ".join(quantity(len(each["clusters"]), "group") for each in groups)
        notes += [(f"{some}: the report's choice, not a property of the images.", False)]
        notes += [(text, False) for dataset in numbers["datasets"] if (text := _few_to_learn(numbers, dataset))]
    notes += [(text, False) for sweep in numbers["sweeps"] if (text := _rate_at_end(sweep))]
    total = len(numbers["verdicts"])
    if total > 1:
        above = sum(verdict["low"] > 0 for verdict in numbers["verdicts"])
        below = sum(verdict["high"] < 0 for verdict in numbers["verdicts"])
        still = sum(verdict["adjusted_low"] > 0 for verdict in numbers["verdicts"])
        text = f"{above} of {total} intervals of differences lie above zero, {below} below"
        text += f"; adjusted for all {total} comparisons (Bonferroni), {still} lie above."
        notes.append((text, above == still > 0 == below))
    return [{"text": text, "is_good": is_good} for text, is_good in notes]


def _few_to_learn(numbers: Line, dataset: Line) -> str:
    """Say that a model was pretrained on few images; empty if there is no such model."""
    images = dataset["splits"]["train"]
    if images >= FEW_TO_PRETRAIN or all(stage["job"] != "pretrain" for stage in numbers["stages"]):
        return ""
    return (
        f"{dataset['name']}: {quantity(images, 'training image')} are few to learn from without labels; images of a"
        " group may share no more than their colours."
    )


def _rate_at_end(sweep: Line) -> str:
    """Say that the chosen learning rate is the lowest or highest of a sweep's; empty if not, or for a search."""
    rates = sorted({trial["learning_rate"] for trial in sweep["trials"]})
    if "kind" in sweep or sweep["chosen"] not in (rates[0], rates[-1]):
        return ""
    end, better = ("lowest", "lower") if sweep["chosen"] == rates[0] else ("highest", "higher")
    tried = f"{sweep['stage']}: the chosen learning rate, {sweep['chosen']:g}, is the {end} of the {len(rates)} tried"
    return f"{tried}; a {better} one may be better (learning_rates)."


def _label_problems(dataset: Line, has_thresholds: bool) -> Iterator[str]:
    """Say what limits the labels of a data set: copies in several classes, and classes with next to no images.

    Args:
        has_thresholds: methods chose the classes' thresholds on dev.
    """
    if conflicting := dataset["conflicting"]:
        yield f"{conflicting:,} images have the same bytes as an image of another class"
    for names, images in (
        (dataset["untested"], "no test image"),
        (dataset["few"], f"fewer than {FEW} training images"),
        (
            dataset["few_dev"] if has_thresholds else [],
            f"a threshold from fewer than {FEW_DEV} dev images, so that which images get them is mostly chance",
        ),
    ):
        if names:
            more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
            named = f"{', '.join(map(quoted, names[:SHOWN]))}{more}"
            yield f"{len(names):,} of {dataset['num_classes']:,} classes with {images} ({named})"


def _leakage(stages: Sequence[Line]) -> Iterator[tuple[str, bool]]:
    """Say whether test images were among training images, if stages looked."""
    measured = [stage for stage in stages if "test_images_seen_in_training" in stage["metrics"]]
    seen, shared, near = (
        {stage["stage"]: count for stage in measured if (count := stage["metrics"].get(f"test_images_{name}"))}
        for name in ("seen_in_training", "also_in_train", "near_training_images")
    )
    tested = (stage for stage in stages if stage["kind"] != "audit")  # an audit judges train and dev
    unknown = [stage["stage"] for stage in tested if "unknown_training" in stage["metrics"]]
    if seen:
        named = ", ".join(f"{count:,} in {stage}" for stage, count in seen.items())
        yield f"Models were trained on some of their test images ({named}); these are scored apart.", False
    if unknown:
        said = f"The training images of the models behind {', '.join(unknown)} are unknown"
        yield f"{said}; test images may be among them.", False
    parts = ["No test image was used in training."] if measured and not (seen or unknown or shared) else []
    for found, copy in ((shared, "a copy"), (near, "a near-copy")):
        if found:
            images = quantity(max(found.values()), "test image")
            parts.append(f"Up to {images} have {copy} among the training images.")
    if parts:
        yield " ".join(parts), not (shared or near)


def cost(stages: Sequence[Line], environments: Sequence[Line]) -> dict[str, Any]:
    """Return the time in which a stage ran, the three longest stages, and the hours of cores and GPUs.

    Attempts count if their work was used. A stage may have used less of its machine: the hours are an upper bound,
    rounded up to tenths.
    """
    clock, until = sum(stage["earlier_seconds"] for stage in stages), 0.0
    ends = [(datetime.fromisoformat(stage["finished"]).timestamp(), stage) for stage in stages]
    last = [(end - stage["seconds"] + stage["earlier_seconds"], end) for end, stage in ends]
    for start, end in sorted(last):  # stages may have run in parallel
        clock += max(0.0, end - max(start, until))
        until = max(until, end)
    took = {stage["stage"]: stage["seconds"] for stage in stages}
    hours: Counter[str] = Counter()
    for environment in environments:
        for unit, name in (("CPU", "core"), ("GPU", "GPU")):
            if amount := environment["cluster"].get(unit):
                hours[name] += amount * sum(took[stage] for stage in environment["stages"]) / 3600
    longest = sorted(stages, key=lambda stage: -stage["seconds"])[:3]
    bounds = {name: math.ceil(10 * amount) / 10 for name, amount in hours.items()}
    return {"clock": clock, "hours": bounds, "longest": longest}


def model(numbers: Line) -> str | None:
    """Return the artifact of the fine-tuned model to use: with most labels, the most accurate on held-out images."""
    models = {stage["artifact"]: stage["metrics"] for stage in numbers["stages"] if stage["kind"] in WEIGHTS}
    places = {artifact: place for place, artifact in enumerate(models)}  # lines may be in the order of test results
    names = ("accuracies", "several_labels", "detectors", "pixel_classes")
    tuned = [line for name in names for line in numbers.get(name, ()) if line["artifact"] in models]
    best = max(
        tuned,
        key=lambda line: (
            line.get("labels_per_class") or float("inf"),
            *(
                models[line["artifact"]].get(f"validation_{metric}", 0.0)
                for metric in (ACCURACY, MEAN_AP, AP, MEAN_IOU)
            ),
            "pretrained" in line["method"],
            "frozen" not in line["method"],
            -places[line["artifact"]],
        ),
        default=None,
    )
    return best and best["artifact"]
