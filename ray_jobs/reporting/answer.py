"""The answer of a report in words: a question, one sentence, and what to do next.

In: the lines of report.json. Out: texts. Of several references of a method, the sentence takes the strongest; it speaks
of the fewest labels first, and then of the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.spec import quantity
from ray_jobs.evaluation.rows import (
    CHOSEN_ON_TEST,
    CLASS_FREQUENCIES,
    MEAN_AP,
    MEDIAN_BOX,
    MOST_FREQUENT,
    REAL,
    is_reference,
)
from ray_jobs.reporting.studies import ON_TEST, headline, is_repeated, is_whole, on_test, question
from ray_jobs.reporting.verdicts import REFERENCES, decimals, of_metric, percent, points

Line = Mapping[str, Any]
ADVICE = "Next, start from pretrained weights: vitflow init FILE --images FOLDER --from hf:ORG/NAME"
MOST_INSPECTED = 3  # models in one answer
MANY_VALUES = 3  # of an axis of a matrix, so that the report is about this axis
PROTOCOLS = {"few-shot linear": "linear probe", "fine-tuning": "fine-tuned"}


def answer(numbers: Line) -> dict[str, str]:
    """Return the question of a report, the sentence that answers it, and advice, which may be empty."""
    trained = [score for score in numbers["vtab"] if score["trained"]]
    studied = sorted(numbers.get("studies", ()), key=_is_on_dev)
    whole = [line for line in numbers["accuracies"] if not line["apart"]]
    if trained:
        asked, said = "How good is the model on VTAB-1k?", _on_vtab(trained)
    elif along := study_of(numbers):
        asked, said = question(along), headline(along)
    elif numbers["costs"] and len({group["task"] for group in numbers["costs"]}) == 1:
        asked, said = "Which backbone is best?", _best_backbone(numbers)
    elif numbers["verdicts"]:
        asked, said = "Which method is best?", _compared(numbers["verdicts"])
    elif models := [line for line in whole if not is_reference(line["method"])]:
        asked, said = "How good is the model?", _highest(models)
    elif apart := [line for line in numbers["accuracies"] if line["apart"]]:
        asked, said = "How good is the model?", _apart(apart)
    elif whole:
        asked, said = "How good is the model?", _highest(whole)
    elif others := [line for line in on_test(numbers) if not is_reference(line["method"])]:
        of_whole = [line for line in others if not line["apart"]]
        asked, said = "How good is the model?", _highest_metric(of_whole) if of_whole else _apart(others)
    elif audits := numbers.get("label_issues"):
        asked = "Which labels are probably wrong?"
        said = "; ".join(audit["headline"] for audit in audits) + "."
    elif embeddings := numbers.get("embeddings"):
        asked, said = "What kinds of images are there?", _clustered(embeddings)
    elif 0 < len(inspections := numbers.get("inspections", ())) <= MOST_INSPECTED:
        asked, said = "What does the model look at?", " ".join(map(_inspected, inspections))
    elif studied:
        asked, said = question(studied[0]), headline(studied[0])
    else:
        kinds = Counter(stage["kind"] for stage in numbers["stages"])
        listed = ", ".join(quantity(count, kind) for kind, count in sorted(kinds.items()))
        asked, said = "What does this report show?", f"It shows {listed}; nothing was scored."
    return {
        "question": asked,
        "headline": said[:1].upper() + said[1:],
        "advice": _advice(numbers["verdicts"]),
    }


def study_of(numbers: Line) -> Line | None:
    """Return the study of many values or several seeds that a report is about, rather on test than on dev."""
    along = (
        each
        for each in numbers.get("studies", ())
        if is_whole(each) and (len(each["ticks"]) >= MANY_VALUES or is_repeated(each))
    )
    return min(along, key=_is_on_dev, default=None)


def _is_on_dev(study: Line) -> bool:
    return not study["metric"].endswith(ON_TEST)


def _advice(verdicts: Sequence[Line]) -> str:
    """Advise against training from scratch if it is never better than the best classifier on pixels."""
    is_in_vain = all(
        "from scratch" in verdict["method"]
        and (verdict["reference_kind"], verdict["conclusion"] == "above zero") == ("pixels", False)
        for verdict in verdicts
    )
    return ADVICE if verdicts and is_in_vain else ""


def settings(verdicts: Sequence[Line]) -> list[list[Line]]:
    """Group comparisons by task, number of labels and judged method, the strongest reference of each group first."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for verdict in verdicts:
        key = verdict["task"], verdict["labels_per_class"], verdict["protocol"], verdict["artifact"]
        groups.setdefault((*key, verdict["method"]), []).append(verdict)
    return [sorted(group, key=lambda verdict: -verdict[f"reference_{verdict['metric']}"]) for group in groups.values()]


def _apart(lines: Sequence[Line]) -> str:
    if all(CHOSEN_ON_TEST in line["method"] for line in lines):
        return "nothing to compare: settings were chosen on test, so the accuracies are too high."
    return (
        "nothing to compare: the model was trained on some of the test images, so its results cover only parts of them."
    )


def _compared(verdicts: Sequence[Line]) -> str:
    """Describe comparisons on one task by one metric: of one method with few labels and with many, or of several.

    Otherwise count them. Of several protocols or methods with the same number of labels, the sentence takes the best.
    """
    strongest = [group[0] for group in settings(verdicts)]
    names = ("task", "metric", "labels_per_class", "method")
    tasks, metrics, labels, methods = ({verdict[name] for verdict in strongest} for name in names)
    if len(tasks) > 1 or len(metrics) > 1 or len(methods) > 1 < len(labels):
        return _counted(strongest)
    ordered = sorted(
        strongest,
        key=lambda verdict: (verdict["labels_per_class"] or float("inf"), -verdict[verdict["metric"]]),
    )
    first, metric = ordered[0], ordered[0]["metric"]
    last = next(verdict for verdict in ordered if verdict["labels_per_class"] == ordered[-1]["labels_per_class"])
    more = ", training images unknown" * first["unknown_training"] + _best_of(first, strongest)
    is_open = all(verdict["conclusion"] == "not told from zero" for verdict in (first, last))
    told = _told_by_others(first) * is_open
    said = (
        f"{('it cannot be told' + f' by {metric}' * bool(told) + ': ') * is_open}{subject(first['method'])} reaches"
        f" {percent(first[metric], _digits(first))}{of_metric(metric)} with {_setting(first, more)} on"
        f" {first['num_images']:,} test images, {_difference(first)}{told}"
    )
    if last is first:
        return f"{said}."
    is_again = last["reference"] == first["reference"]
    return f"{said}; with {_setting(last, _best_of(last, strongest))}, {_difference(last, is_again)}."


def _told_by_others(verdict: Line) -> str:
    """Return '; macro-F1 is lower (−9.5 points, 95% interval −17.2 to −1.9)' for each other metric that is told."""
    return "".join(
        f"; {other['metric']} is {'higher' if other['value'] > 0 else 'lower'} ({points(other['value'])} points,"
        f" 95% interval {points(other['low'], sign='')} to {points(other['high'], sign='')})"
        for other in verdict["other_differences"]
        if other["low"] > 0 or other["high"] < 0
    )


def _best_of(verdict: Line, strongest: Sequence[Line]) -> str:
    """Return ', the best of 3 by test accuracy' or mAP if several models or protocols have as many labels."""
    same = [other for other in strongest if other["labels_per_class"] == verdict["labels_per_class"]]
    return f", the best of {len(same)} by test {verdict['metric']}" if len(same) > 1 else ""


def _clustered(embeddings: Sequence[Line]) -> str:
    said = []
    for embedding in embeddings:
        sizes = [cluster["images"] for cluster in embedding["clusters"]]
        some = f" of {min(sizes):,} to {max(sizes):,} images" if len(sizes) > 1 else ""
        who = embedding["stage"] if len(embeddings) > 1 else "this report"
        images, groups = quantity(sum(sizes), "training image"), quantity(len(sizes), "group")
        said.append(f"{who} sorts {images} into {groups}{some}")
    return f"{'; '.join(said)} that look alike to the model; groups.csv beside the page lists them."


def _inspected(inspection: Line) -> str:
    reaches = (
        "In the first block of {backbone}, attention reaches {first_block_pixels:.1f} pixels on average, in the last"
    )
    said = f"{reaches} {{last_block_pixels:.1f}}; attention to all patches equally would reach {{uniform_pixels:.1f}}."
    return said.format(**inspection)


def _difference(verdict: Line, is_again: bool = False) -> str:
    """Return '10.3 points (95% interval 8.4 to 12.2) above the best classifier on pixels, k-NN at 53.1%'.

    Args:
        is_again: the sentence has named the reference before.
    """
    reference, value = REFERENCES[verdict["reference_kind"]], verdict["difference"]
    if verdict["reference"].startswith(MOST_FREQUENT):
        reference = "always answering the most frequent class"
    elif verdict["reference"].startswith(CLASS_FREQUENCIES):
        reference = "answering each class's frequency"
    elif verdict["reference"] == MEDIAN_BOX:
        reference = "answering the median box"
    elif verdict["reference"].startswith("pixels"):
        reference = verdict["reference"].replace("pixels", "the same probe on pixels")
    elif verdict["reference_kind"] == "pixels":
        reference += f", {verdict['reference']}"
    reference += f" at {percent(verdict['reference_' + verdict['metric']], _digits(verdict))}"
    if verdict["conclusion"] == "not told from zero":
        if is_again:
            return "the two cannot be told apart"
        ends = f"{points(verdict['low'], sign='')} to {points(verdict['high'], sign='')} points"
        return f"not clearly different from {reference} (95% interval of the difference: {ends})"
    side = "above" if value > 0 else "below"
    low, high = sorted(abs(verdict[bound]) for bound in ("low", "high"))
    interval = f"95% interval {points(low, sign='')} to {points(high, sign='')}"
    size = f"{points(abs(value), sign='', digits=_digits(verdict))} points ({interval}) {side}"
    return f"it is {size} it" if is_again else f"{size} {reference}"


def _digits(verdict: Line) -> int:
    """Return the decimals of a comparison's percentages: one, unless the sentence subtracts them and needs more."""
    if verdict["conclusion"] == "not told from zero":
        return 1
    metric = verdict["metric"]
    return decimals(verdict[metric], verdict[f"reference_{metric}"], verdict["difference"])


def _counted(strongest: Sequence[Line]) -> str:
    counts = Counter(verdict["conclusion"] for verdict in strongest)
    total, tasks = len(strongest), len({verdict["task"] for verdict in strongest})
    where = f" on {tasks} tasks" if tasks > 1 else ""
    return (
        f"in {total} comparisons with the strongest reference{where}, the model is better in"
        f" {counts['above zero']}, worse in {counts['below zero']}, and cannot be told apart in"
        f" {counts['not told from zero']}."
    )


def _best_backbone(numbers: Line) -> str:
    """Name the most accurate backbone, fine-tuned if any were, and say whether it is told from the second."""
    groups = numbers["costs"]
    group = next((group for group in groups if group["protocol"] == "fine-tuning"), groups[0])
    best, second = group["lines"][:2]
    images = next(line["num_images"] for line in numbers["accuracies"] if line["artifact"] == best["artifact"])
    models = f"{len(group['lines'])} models from " if len(group["lines"]) > group["backbones"] else ""
    said = (
        f"{best['backbone']} is the most accurate of {models}{group['backbones']} backbones:"
        f" {percent(best['accuracy'])} with {group['labels'].partition(' (')[0]} ({_how(group['protocol'])}) on"
        f" {images:,} test images"
    )
    if (difference := second["minus_best"]) is None:
        return f"{said}; {second['backbone']} was scored on other images or labels."
    low, high = sorted((-difference["low"], -difference["high"]))
    interval = f"95% interval {points(low, sign='')} to {points(high, sign='')}"
    if low > 0:
        return f"{said}, {points(-difference['value'], sign='')} points ({interval}) above {second['backbone']}."
    lower = f"{points(-difference['value'], sign='')} points lower ({interval})"
    return f"{said}; {second['backbone']}, {lower}, cannot be told from it."


def _highest(lines: Sequence[Line]) -> str:
    lines = [line for line in lines if not line["task"].endswith(REAL)] or lines
    tasks = {line["task"] for line in lines}
    if len(tasks) > 1:
        return f"{len(lines)} accuracies on {len(tasks)} tasks, without a comparison; the table lists them."
    best = max(lines, key=lambda line: line["accuracy"])
    interval = f"95% interval {percent(best['low'])} to {percent(best['high'])}"
    said = f"with {_setting(best)} on {quantity(best['num_images'], 'test image')}"
    if len(lines) == 1:
        reached = f"{subject(best['method'])} reaches {percent(best['accuracy'])} ({interval}) {said}"
        return f"{reached}; it is not compared with another method."
    missing = "a reference with the same labels, such as `baselines`"
    if any("trained on these" in line["method"] for line in lines):
        missing = "a model that was not trained on these labels before, and a reference with the same draws"
    return (
        f"the highest of {len(lines)} accuracies is {percent(best['accuracy'])} ({interval}), of"
        f" {subject(best['method'])} {said}; nothing is compared, which takes {missing}."
    )


def _highest_metric(lines: Sequence[Line]) -> str:
    """Name the model with the highest mAP, or with the highest of another metric if none has one."""
    metric = MEAN_AP if any(line["metric"] == MEAN_AP for line in lines) else lines[0]["metric"]
    best = max((line for line in lines if line["metric"] == metric), key=lambda line: line["value"])
    ends = "no interval" if best["low"] is None else f"95% interval {percent(best['low'])} to {percent(best['high'])}"
    return (
        f"the highest {metric} is {percent(best['value'])} ({ends}), of {subject(best['method'])}"
        f" ({_how(best['protocol'])}) on {quantity(best['num_images'], 'test image')} of {best['task']}."
    )


def _on_vtab(scores: Sequence[Line]) -> str:
    """Return the mean of the best score with the most labels, on the most tasks."""

    def mean(score: Line) -> Line:
        measured: Line = next(column for column in reversed(score["columns"]) if column["tasks"])
        return measured

    many = [score for score in scores if not mean(score)["labels"].endswith(("shot", "shots"))]
    best = max(many or scores, key=lambda score: (mean(score)["tasks"], mean(score)["mean"]))
    column, total = mean(best), len(best["tasks"])
    over = f"all {total} tasks" if column["tasks"] == total else f"{column['tasks']} of the {total} tasks"
    peers = sum(all(mean(score)[name] == column[name] for name in ("labels", "tasks")) for score in scores)
    among = f", the best of {peers} scores" if peers > 1 else ""
    labels = (
        column["labels"] if column["labels"].endswith(("labels", "shots", "shot")) else f"{column['labels']} labels"
    )
    reached = f"{subject(best['method'])} reaches {percent(column['mean'])} with {labels}"
    return f"{reached}, the mean of {over}{among}."


def subject(method: str) -> str:
    """Return a method as the subject of a sentence: 'the pretrained ViT (LoRA)' for 'ViT, pretrained, LoRA'."""
    name, *parts = method.split(", ")
    for part, form in {
        "pretrained": "the pretrained {}",
        "untrained": "the untrained {}",
        "from scratch": "the {} trained from scratch",
    }.items():
        if part in parts:
            rest = [other for other in parts if other != part]
            return form.format(name) + (f" ({', '.join(rest)})" if rest else "")
    return method


def _setting(line: Line, more: str = "") -> str:
    """Return '5 labels per class (linear probe)'."""
    how = "all weights trained" if "from scratch" in line["method"] else _how(line["protocol"])
    return f"{line['labels'].partition(' (')[0]} ({how}{more})"


def _how(protocol: str) -> str:
    return PROTOCOLS.get(protocol, protocol.removeprefix("few-shot "))
