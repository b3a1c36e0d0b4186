"""What the site of a store shows, as JSON.

In: a store. Out: `collect`'s dictionary, which `site.js.j2` turns into pages. Runs that are over, and what artifacts
measured, are read once and then come from the catalog (`pipelines.store.catalog`), so that a new run costs what is new.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pipelines.engine.history import READERS, is_run, plan_of, position_of, recipe_of
from pipelines.engine.runs import run_status
from pipelines.environment import environment
from pipelines.identity import sha256
from pipelines.results.accuracies import expected_optimism
from pipelines.results.compare import measured_files, measured_line, measurements
from pipelines.results.listing import list_kind
from pipelines.results.lookup import recipe_and_stage
from pipelines.schedules.schedule import Schedule, all_schedules
from pipelines.schedules.ticks import Position, history, refresh
from pipelines.spec import RecipeError
from pipelines.store import (
    Alias,
    Found,
    Manifest,
    Store,
    alias_history,
    alias_names,
    all_manifests,
    listed,
    now,
    read_overs,
    warn,
)
from ray_jobs.evaluation.rows import ACCURACY, MEAN_AP, is_apart, is_reference
from vit_model.fields import Frozen

TICKS = 50  # of each schedule, the newest
_DIFFERENCE = ("difference", "lower", "upper")


class SiteStage(Frozen):
    """A stage of a run."""

    stage: str
    job: str
    status: str
    key: str | None = None
    detail: str = ""


class SiteRun(Frozen):
    """A run: how it ended, its stages, and the fields of its recipe, {"pretrain.steps": "100"}, as JSON."""

    run: str
    status: str
    created: str
    ended: str | None
    detail: str
    stages: tuple[SiteStage, ...]
    fields: dict[str, str]


class Line(Frozen):
    """The mean of one method on test over its draws of labels, with its 95% interval; fractions."""

    task: str
    test: str
    """A digest of the ids of the test images: results are on one board only if they are on the same images."""
    protocol: str
    method: str
    labels_per_class: int | None
    metric: str
    value: float
    low: float
    high: float
    draws: int
    images: int


class Measured(Frozen):
    """What an artifact measured on test."""

    key: str
    lines: tuple[Line, ...]


def collect(store: Store) -> dict[str, Any]:
    """Return what the pages show. Keys of artifacts are the first 12 characters, as in tables.

    Returns:
        store, made: its URI, and when this was collected.
        runs: sorted by time, each with the fields of its recipe that changed since the recipe's previous run.
        artifacts: those with results, models, and reports, by key.
        settings: (task, test images, protocol, method, labels per class, metric) of the results.
        results: key -> lines (number of the setting, value, low, high, draws, images).
        boards: (task, test images, protocol, labels per class, metric), and how often these images were looked at.
        models, aliases with their moves, schedules with their ticks.
    """
    manifests = [*all_manifests(store)]
    measured = _measured(store, manifests)
    settings = {_setting(line): None for each in measured for line in each.lines}
    number = {setting: place for place, setting in enumerate(settings)}
    has_lines = {each.key for each in measured if each.lines}
    models = list_kind(store, "models")
    shown = has_lines | {row["key"] for row in models} | {each.key for each in manifests if each.kind == "report"}
    return {
        "store": store.uri,
        "made": now()[:19],
        "runs": [*_changes(_runs(store))],
        "artifacts": {_short(each.key): _artifact(each) for each in manifests if each.key in shown},
        "settings": [*settings],
        "results": {
            _short(each.key): [_numbers(line, number[_setting(line)]) for line in each.lines]
            for each in measured
            if each.lines
        },
        "boards": _boards(line for each in measured for line in each.lines),
        "models": [_model(row) for row in models],
        "aliases": {name: _moves(store, name, manifests) for name in alias_names(store)},
        "schedules": [_schedule(store, schedule) for schedule in all_schedules(store)],
    }


def _short(key: str) -> str:
    return key[:12]


def _artifact(manifest: Manifest) -> dict[str, Any]:
    title = {"title": str(manifest.config.get("title") or "")} if manifest.kind == "report" else {}
    return {
        "name": recipe_and_stage(manifest),
        "kind": manifest.kind,
        "run": manifest.run,
        "finished": manifest.finished[:19],
        **title,
    }


def _setting(line: Line) -> tuple[str, str, str, str, int | None, str]:
    return line.task, line.test, line.protocol, line.method, line.labels_per_class, line.metric


def _numbers(line: Line, setting: int) -> tuple[float, ...]:
    return setting, round(line.value, 5), round(line.low, 5), round(line.high, 5), line.draws, line.images


def _runs(store: Store) -> Iterator[SiteRun]:
    """Yield all runs, oldest first."""
    versions = store.versions("runs", ["plan.json", "over.json"], "events")

    def read(ids: Sequence[str]) -> Iterator[Found[SiteRun]]:
        with environment().pool(READERS) as threads:
            plans = threads.map(partial(plan_of, store), ids)
        for run, plan, over in zip(ids, plans, read_overs(store, ids), strict=True):
            if plan is None:
                continue
            status = run_status(store, run)
            stages = tuple(SiteStage.model_validate(_known(each)) for each in status["stages"])
            found = SiteRun(
                run=run,
                status=status["status"],
                created=status["created"],
                ended=over and over.time,
                detail="" if over is None else over.detail,
                stages=stages,
                fields=dict(_flat(plan["pipeline"]["stages"])),
            )
            yield Found(position_of(run), run, found, is_final=over is not None)

    return listed(store, "site/runs", {run: versions[run] for run in versions if is_run(run)}, SiteRun, read)


def _known(stage: Mapping[str, Any]) -> dict[str, Any]:
    return {name: stage[name] for name in SiteStage.model_fields if stage.get(name) is not None}


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, JSON) of each field, such as ("pretrain.mixup.alpha", "0.2")."""
    for name, field in value.items():
        if isinstance(field, dict) and field:
            yield from _flat(field, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(field)


def _changes(runs: Iterator[SiteRun]) -> Iterator[dict[str, Any]]:
    """Yield each run with `changed`: {field: JSON, or null if it has gone} since the recipe's previous run.

    The first run of a recipe has all its fields, so the fields of each run can be put together again.
    """
    before: dict[str, Mapping[str, str]] = {}
    for run in runs:
        recipe = recipe_of(run.run)
        then = before.get(recipe, {})
        changed: dict[str, str | None] = {name: text for name, text in run.fields.items() if then.get(name) != text}
        changed |= dict.fromkeys(then.keys() - run.fields.keys())
        before[recipe] = run.fields
        fields = run.model_dump(exclude={"fields", "stages"}, exclude_defaults=True)
        yield fields | {"recipe": recipe, "changed": changed, "stages": [_stage(each) for each in run.stages]}


def _stage(stage: SiteStage) -> tuple[str, ...]:
    """Return (name, status, key, detail) without what is empty or repeats the key."""
    key = _short(stage.key or "")
    parts = (stage.stage, stage.status, key, "" if stage.detail == key else stage.detail)
    return parts if parts[-1] else parts[:-1]


def _measured(store: Store, manifests: list[Manifest]) -> list[Measured]:
    """Return what each artifact measured."""
    measured = {each.key: each for each in manifests if each.kind != "report" and measured_files(each)}

    def read(keys: Sequence[str]) -> Iterator[Found[Measured]]:
        for key in keys:
            try:
                found = measurements(store, [measured[key]])
            except RecipeError as error:
                warn(f"{error}; leaving it out")
                continue
            lines = tuple(_line(entry, ACCURACY) for entry in found.entries)
            lines += tuple(_line(entry, MEAN_AP) for entry in found.scored)
            yield Found(measured[key].finished, key, Measured(key=key, lines=lines))

    # a manifest names the sha256 of its files
    versions = {key: manifest.own_sha256 for key, manifest in measured.items()}
    return [*listed(store, "site/results", versions, Measured, read)]


def _line(entry: Any, metric: str) -> Line:
    line = measured_line(entry, metric, entry.table(metric))
    return Line(
        task=entry.task,
        test=sha256("\n".join(entry.sample_ids))[:8],
        protocol=line["protocol"],
        method=line["method"],
        labels_per_class=line["labels_per_class"],
        metric=metric,
        value=line[metric],
        low=line["low"],
        high=line["high"],
        draws=line["draws"],
        images=line["num_images"],
    )


def _boards(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return each task and setting with how many results were judged on its test images, and the luck of the best."""
    of_setting: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        if not is_apart(line.method):
            of_setting[line.task, line.test, line.protocol, line.labels_per_class, line.metric].append(line)
    boards = []
    for (task, test, protocol, labels, metric), found in of_setting.items():
        judged = max(1, sum(not is_reference(line.method) for line in found))
        best = max(found, key=lambda line: line.value)
        optimism = expected_optimism(judged, best.value, best.images) if metric == ACCURACY else None
        setting = {"task": task, "test": test, "protocol": protocol, "labels_per_class": labels, "metric": metric}
        boards.append(setting | {"images": best.images, "judged": judged, "optimism": optimism})
    names = ("task", "images", "test", "protocol")
    return sorted(boards, key=lambda each: (*(each[name] for name in names), each["labels_per_class"] or 10**9))


def _model(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("recipe/stage", "job", "parameters", "accuracy", "finished", "run")
    return {name: row[name] for name in names} | {"key": _short(row["key"])}


def _moves(store: Store, alias: str, manifests: list[Manifest]) -> list[dict[str, Any]]:
    """Return the moves of an alias, oldest first, each with what its comparison found."""
    compared = {each.key: each for each in manifests if each.job == "promote"}
    return [_move(record, compared.get(record.report or "")) for record in alias_history(store, alias)]


def _move(record: Alias, compared: Manifest | None) -> dict[str, Any]:
    return {
        "number": record.number,
        "key": record.target and _short(record.target.key),
        "why": record.why,
        "who": record.who,
        "time": record.time[:19],
        "run": record.run,
        "report": record.report and _short(record.report),
        "reason": None if compared is None else compared.metrics.get("reason"),
        "difference": None if compared is None else [compared.metrics.get(each) for each in _DIFFERENCE],
    }


def _schedule(store: Store, schedule: Schedule) -> dict[str, Any]:
    """Return a schedule with its last ticks, the newest first."""
    refresh(store, schedule.name, position := Position())
    return {
        "name": schedule.name,
        "recipe": schedule.pipeline.name,
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "state": schedule.state,
        "failures": position.failures,
        "ticks": [
            {
                "tick": tick.tick[:19],
                "decision": tick.decision,
                "run": tick.run,
                "status": end and end.status,
                "why": (end and end.why) or tick.why,
            }
            for tick, end in history(store, schedule.name, position, TICKS)
        ],
    }
