"""VTAB-1k's table: accuracies by task and number of labels, their means, and how many of the 19 tasks they cover.

In: `Entry`s and the evaluations behind them (`Evaluated`). Out: dictionaries for report.json. The mean is over tasks,
each of which counts once (BiT, section 3.2), not over the means of the three groups.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.spec import STAGE_TYPES
from pipelines.spec.vtab import GROUPS, TASKS, Task
from pipelines.store import Manifest
from ray_jobs.reporting.measures import Entry
from ray_jobs.reporting.provenance import at_checkpoint
from ray_jobs.reporting.verdicts import kind, percent
from vit_model.fields import marks

GROUP_NAMES = tuple(dict.fromkeys(GROUPS.values()))
# Fields that may differ within one score: of a stage (besides its execution fields), and of a task's source.
_NOT_THE_PROTOCOL = {"data", "backbone"}
_NOT_THE_KIND = {"task", "root", "membership"}


@dataclass(frozen=True)
class Evaluated:
    """An evaluation or a fine-tuning on a task: its stage, protocol and backbone, and notes on the task's images."""

    task: Task
    stage: str
    job: str
    protocol: str
    backbone: str
    notes: tuple[str, ...]


def evaluated(manifests: Iterable[tuple[str, Manifest]], notes: Mapping[str, tuple[str, ...]]) -> dict[str, Evaluated]:
    """Return the evaluations of VTAB tasks by their artifact's key.

    Args:
        manifests: (stage, manifest) of all inputs of a report; an evaluation's dataset must be among them.
        notes: dataset -> notes on its images and splits.
    """
    parts = list(manifests)
    names = {manifest.key: stage for stage, manifest in parts}
    sources = {
        manifest.key: manifest.config["source"]
        for _, manifest in parts
        if (source := manifest.config.get("source", {})).get("kind") == "vtab"
        and source.get("subset", "vtab_1k") == "vtab_1k"
    }
    evaluations = {}
    for stage, manifest in parts:
        if manifest.job not in ("evaluate", "finetune") or "backbone" not in manifest.inputs:
            continue
        if (data := manifest.inputs["data"][0].key) in sources:
            fields = STAGE_TYPES[manifest.job].model_fields
            protocol = {
                name: value
                for name, value in manifest.config.items()
                if name not in _NOT_THE_PROTOCOL and not marks(fields[name]).get("execution")
            }
            protocol["source"] = {name: value for name, value in sources[data].items() if name not in _NOT_THE_KIND}
            backbone = manifest.inputs["backbone"][0].key
            evaluations[manifest.key] = Evaluated(
                task=sources[data]["task"],
                stage=stage.partition("@")[0],
                job=manifest.job,
                protocol=json.dumps(protocol, sort_keys=True),
                backbone=f"{names.get(backbone, backbone[:12])}{at_checkpoint(manifest.config, 'backbone')}",
                notes=notes.get(data, ()),
            )
    return evaluations


def scores(entries: Sequence[Entry], evaluations: Mapping[str, Evaluated]) -> list[dict[str, Any]]:
    """Return one score per protocol, backbone, classifier and method; trained first, fine-tuned before frozen.

    If several artifacts measured the same task, on variants of its images, each gets a separate score. Accuracies are
    fractions, null where there are none.
    """
    groups: dict[tuple[str, str, str, str, str, int], list[Entry]] = {}
    measured: dict[tuple[str, ...], list[str]] = {}  # the artifacts that measured a task in the same way
    for entry in entries:
        if (evaluation := evaluations.get(entry.artifact)) is not None:
            key = evaluation.stage, evaluation.protocol, evaluation.backbone, _classifier(entry), entry.method
            artifacts = measured.setdefault((*key, evaluation.task), [])
            if entry.artifact not in artifacts:
                artifacts.append(entry.artifact)
            groups.setdefault((*key, artifacts.index(entry.artifact)), []).append(entry)
    budgets = sorted(
        {entry.labels_per_class for group in groups.values() for entry in group},
        key=lambda labels: (labels is None, labels or 0),
    )
    # Several stages may have scored the same model with the same method; then the sentences name them.
    alike = Counter((backbone, classifier, method) for _, _, backbone, classifier, method, _ in groups)
    all_scores = [
        _score(group, budgets, evaluations, alike[backbone, classifier, method] > 1)
        for (_, _, backbone, classifier, method, _), group in groups.items()
    ]
    return sorted(all_scores, key=lambda score: (not score["trained"], score["job"] != "finetune"))


def _classifier(entry: Entry) -> str:
    """Return what was fitted, for any number of labels: 'linear', 'k-NN' or 'fine-tuning'."""
    return entry.protocol.removeprefix("few-shot ").replace("linear probe", "linear")


def _score(
    entries: Sequence[Entry],
    budgets: Sequence[int | None],
    evaluations: Mapping[str, Evaluated],
    names_stage: bool,
) -> dict[str, Any]:
    by_task: dict[str, dict[int | None, Entry]] = {}
    for entry in entries:
        by_task.setdefault(evaluations[entry.artifact].task, {})[entry.labels_per_class] = entry
    tasks = [_line(task, by_task.get(task, {}), budgets, evaluations) for task in TASKS]
    evaluation, classifier = evaluations[entries[0].artifact], _classifier(entries[0])
    missing = [line["title"] for line in tasks if line["missing"]]
    columns = [_column(labels, number, tasks, entries) for number, labels in enumerate(budgets)]
    suffix = {"fine-tuning": ", fine-tuned", "linear": ""}.get(classifier, f", {classifier}")
    name = entries[0].method + suffix
    return {
        "stage": evaluation.stage,
        "job": evaluation.job,
        "backbone": evaluation.backbone,
        "method": name,
        "classifier": classifier,
        "trained": kind(entries[0]) == "trained",
        "support": json.loads(evaluation.protocol).get("support", "train+dev"),  # fine-tuning takes both
        "draws": max(len(entry.draws) for entry in entries),
        "columns": columns,
        "tasks": tasks,
        "covered": len(tasks) - len(missing),
        "missing": missing,
        "sentence": _sentence(
            name,
            f"{evaluation.stage} of {evaluation.backbone}" if names_stage else evaluation.backbone,
            columns,
            missing,
        ),
    }


def _line(
    task: Task,
    entries: Mapping[int | None, Entry],
    budgets: Sequence[int | None],
    evaluations: Mapping[str, Evaluated],
) -> dict[str, Any]:
    """Return a task's row from its entries by number of labels; a task that was not measured also has a row."""
    first = next(iter(entries.values()), None)
    return {
        "task": task,
        "title": TASKS[task].title,
        "group": GROUPS[task],
        "missing": first is None,
        "artifact": first.artifact if first else None,
        "num_images": len(first.sample_ids) if first else None,
        "accuracies": [entries[labels].accuracy.value if labels in entries else None for labels in budgets],
        "notes": list(evaluations[first.artifact].notes) if first else [],
    }


def _column(
    labels: int | None, number: int, tasks: Sequence[dict[str, Any]], entries: Sequence[Entry]
) -> dict[str, Any]:
    """Return the means for one number of labels, and the number of tasks behind each."""

    def mean(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
        values = [line["accuracies"][number] for line in lines if line["accuracies"][number] is not None]
        return {"mean": float(np.mean(values)) if values else None, "tasks": len(values)}

    return {
        "labels_per_class": labels,
        "labels": _labels(labels, entries),
        **mean(tasks),
        "groups": {name: mean(line for line in tasks if line["group"] == name) for name in GROUP_NAMES},
    }


def _labels(labels: int | None, entries: Sequence[Entry]) -> str:
    """Return '5 shots', or 'all 1,000' if every task has that many labels."""
    if labels is not None:
        return f"{labels} shot{'s' if labels > 1 else ''}"
    sizes = {
        json.loads(settings).get("labelled_images")
        for entry in entries
        if entry.labels_per_class is None
        for settings in entry.settings
    }
    return f"all {sizes.pop():,}" if len(sizes) == 1 and None not in sizes else "all labels"


def _sentence(name: str, origin: str, columns: Sequence[dict[str, Any]], missing: Sequence[str]) -> str:
    covered = len(TASKS) - len(missing)
    over = f"{covered} of the {len(TASKS)} tasks" if missing else f"all {len(TASKS)} tasks"
    # If fewer tasks were measured with a number of labels, its mean says so.
    means = [
        f"{percent(column['mean'])} with {column['labels']}"
        + (f" ({column['tasks']} tasks)" if column["tasks"] < covered else "")
        for column in columns
        if column["tasks"]
    ]
    rest = f"; missing: {', '.join(missing)}" if missing else ""
    return f"VTAB-1k, {name} ({origin}), mean over {over}: {', '.join(means)}{rest}."
