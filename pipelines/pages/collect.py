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
from pipelines.engine.runs import status_of
from pipelines.environment import environment
from pipelines.identity import sha256
from pipelines.results.accuracies import expected_optimism
from pipelines.results.compare import measured_files, measured_line, measurements
from pipelines.results.lookup import recipe_and_stage, score
from pipelines.schedules.schedule import Schedule, all_schedules
from pipelines.schedules.ticks import Position, history, read_end, refresh
from pipelines.spec import WEIGHTS
from pipelines.store import (
    Alias,
    Found,
    Manifest,
    Store,
    StoreDamaged,
    alias_history,
    alias_names,
    listed,
    now,
    read_overs,
    warn,
)
from ray_jobs.evaluation.rows import ACCURACY, is_apart, is_reference
from ray_jobs.reporting.verdicts import AnyEntry
from vit_model.errors import UserError
from vit_model.fields import Frozen

TICKS = 50  # of each schedule, the newest
_DIFFERENCE = ("difference", "lower", "upper")


class SiteStage(Frozen):
    """A stage of a run."""

    stage: str
    status: str
    key: str | None = None
    detail: str = ""


class SiteRun(Frozen):
    """A run: how it ended, its stages, and their fields, {"pretrain": {"optimizer.ema": "0.99"}}, as JSON."""

    run: str
    status: str
    created: str
    ended: str | None
    detail: str
    stages: tuple[SiteStage, ...]
    fields: dict[str, dict[str, str]]


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


def collect(store: Store, manifests: list[Manifest]) -> dict[str, Any]:
    """Return what the pages show of a store with these artifacts. Damaged records are left out, with a warning.

    Keys of artifacts are the first 12 characters, as in tables.

    Returns:
        store, made: its URI, and when this was collected.
        runs: sorted by time, each with the fields of its stages that changed since the recipe's previous run.
        artifacts: those with results, models, and reports, by key; those with results name the models `of` them.
        settings: (task, test images, protocol, method, labels per class, metric) of the results, and whether they are
            left out of the boards (`is_apart`).
        results: key -> lines (number of the setting, value, low, high, draws, images).
        boards: (task, test images, protocol, labels per class, metric), the best result, and how often these images
            were looked at.
        models with their inputs, aliases with their moves, schedules with their ticks.
    """
    measured = _measured(store, manifests)
    settings = {_setting(line): None for each in measured for line in each.lines}
    number = {setting: place for place, setting in enumerate(settings)}
    has_lines = {each.key for each in measured if each.lines}
    shown = has_lines | {each.key for each in manifests if each.kind in (*WEIGHTS, "report")}
    made = {each.key: each for each in manifests}
    return {
        "store": store.uri,
        "made": now()[:19],
        "runs": [*_changes(_runs(store))],
        "artifacts": {_short(each.key): _artifact(each, made) for each in manifests if each.key in shown},
        "settings": [(*setting, is_apart(setting[3])) for setting in settings],
        "results": {
            _short(each.key): [_numbers(line, number[_setting(line)]) for line in each.lines]
            for each in measured
            if each.lines
        },
        "boards": _boards((each.key, line) for each in measured for line in each.lines),
        "models": [_model(each, made) for each in manifests if each.kind in WEIGHTS],
        "aliases": dict(_aliases(store, manifests)),
        "schedules": [*_schedules(store)],
    }


def _short(key: str) -> str:
    return key[:12]


def _artifact(manifest: Manifest, made: Mapping[str, Manifest]) -> dict[str, Any]:
    """Return what is shown of an artifact; `of` are the models that it measured."""
    of = [_short(key) for _, key in _inputs(manifest) if key in made and made[key].kind in WEIGHTS]
    title = {"title": str(manifest.config.get("title") or "")} if manifest.kind == "report" else {}
    return {
        "name": recipe_and_stage(manifest),
        "run": manifest.run,
        "finished": manifest.finished[:19],
        **({"of": of} if of and manifest.kind not in (*WEIGHTS, "report") else {}),
        **title,
    }


def _inputs(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (role, key) of each input."""
    for role, inputs in manifest.inputs.items():
        for each in inputs:
            yield role, each.key


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
            shown = status_of(store, plan, over)
            found = SiteRun(
                run=run,
                status=shown["status"],
                created=plan["created"],
                ended=over and over.time,
                detail="" if over is None else over.detail,
                stages=tuple(SiteStage.model_validate(_known(each)) for each in shown["stages"]),
                fields={name: dict(_flat(stage)) for name, stage in plan["pipeline"]["stages"].items()},
            )
            yield Found(position_of(run), run, found, is_final=over is not None)

    return listed(store, "site/runs", {run: versions[run] for run in versions if is_run(run)}, SiteRun, read)


def _known(stage: Mapping[str, Any]) -> dict[str, Any]:
    return {name: stage[name] for name in SiteStage.model_fields if stage.get(name) is not None}


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, JSON) of each field, such as ("optimizer.ema", "0.99")."""
    for name, field in value.items():
        if isinstance(field, dict) and field:
            yield from _flat(field, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(field)


def _changes(runs: Iterator[SiteRun]) -> Iterator[dict[str, Any]]:
    """Yield each run with `changed`: {stage: {field: JSON, or null if it has gone}} since the recipe's previous run.

    The first run of a recipe has all its fields, so the fields of each run can be put together again.
    """
    before: dict[str, dict[str, dict[str, str]]] = {}
    for run in runs:
        recipe = recipe_of(run.run)
        then = before.get(recipe, {})
        before[recipe] = run.fields
        stages = [*run.fields, *(stage for stage in then if stage not in run.fields)]
        changed = {stage: _changed(then.get(stage, {}), run.fields.get(stage, {})) for stage in stages}
        yield run.model_dump(exclude={"fields", "stages"}) | {
            "recipe": recipe,
            "changed": {stage: fields for stage, fields in changed.items() if fields},
            "stages": [_stage(each) for each in run.stages],
        }


def _changed(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    return {name: text for name, text in now.items() if then.get(name) != text} | dict.fromkeys(
        then.keys() - now.keys()
    )


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
            except (UserError, StoreDamaged) as error:
                warn(f"{error}; leaving it out")
                continue
            lines = tuple(map(_line, [*found.entries, *found.scored]))
            yield Found(measured[key].finished, key, Measured(key=key, lines=lines))

    # a manifest names the sha256 of its files
    versions = {key: manifest.own_sha256 for key, manifest in measured.items()}
    return [*listed(store, "site/measured", versions, Measured, read)]


def _line(entry: AnyEntry) -> Line:
    metric = entry.metric
    line = measured_line(entry, metric)
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


def _boards(lines: Iterable[tuple[str, Line]]) -> list[dict[str, Any]]:
    """Return each task and setting: its best result, how many were judged on its test images, and the luck of that."""
    of_setting: dict[tuple[Any, ...], list[tuple[str, Line]]] = defaultdict(list)
    for key, line in lines:
        if not is_apart(line.method):
            of_setting[line.task, line.test, line.protocol, line.labels_per_class, line.metric].append((key, line))
    boards = []
    for (task, test, protocol, labels, metric), found in of_setting.items():
        judged = max(1, sum(not is_reference(line.method) for _, line in found))
        key, best = max(found, key=lambda each: each[1].value)
        optimism = expected_optimism(judged, best.value, best.images) if metric == ACCURACY else None
        setting = {"task": task, "test": test, "protocol": protocol, "labels_per_class": labels, "metric": metric}
        shown = {"key": _short(key), "method": best.method, "line": _numbers(best, 0)}
        boards.append(setting | {"images": best.images, "judged": judged, "optimism": optimism, "best": shown})
    names = ("task", "images", "test", "protocol")
    return sorted(boards, key=lambda each: (*(each[name] for name in names), each["labels_per_class"] or 10**9))


def _model(manifest: Manifest, made: Mapping[str, Manifest]) -> dict[str, Any]:
    names = {key: recipe_and_stage(made[key]) if key in made else "deleted" for _, key in _inputs(manifest)}
    return {
        "key": _short(manifest.key),
        "recipe/stage": recipe_and_stage(manifest),
        "job": manifest.job,
        "parameters": manifest.metrics.get("parameters"),
        "accuracy": score(manifest),
        "finished": manifest.finished[:19],
        "run": manifest.run,
        "inputs": [(role, _short(key), names[key]) for role, key in _inputs(manifest)],
    }


def _aliases(store: Store, manifests: list[Manifest]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each alias with its moves, oldest first, and what their comparisons found."""
    compared = {each.key: each for each in manifests if each.job == "promote"}
    for name in alias_names(store):
        try:
            moves = [_move(record, compared.get(record.report or "")) for record in alias_history(store, name)]
        except StoreDamaged as error:
            warn(f"{error}; leaving out @{name}")
            continue
        if moves:
            yield name, moves


def _move(record: Alias, compared: Manifest | None) -> dict[str, Any]:
    return {
        "number": record.number,
        "key": record.target and _short(record.target.key),
        "why": record.why,
        "who": record.who,
        "time": record.time[:19],
        "run": record.run,
        "reason": None if compared is None else compared.metrics.get("reason"),
        "difference": None if compared is None else [compared.metrics.get(each) for each in _DIFFERENCE],
    }


def _schedules(store: Store) -> Iterator[dict[str, Any]]:
    """Yield each schedule with its last ticks, the newest first."""
    for schedule in all_schedules(store):
        try:
            yield _schedule(store, schedule)
        except StoreDamaged as error:
            warn(f"{error}; leaving out schedule {schedule.name}")


def _schedule(store: Store, schedule: Schedule) -> dict[str, Any]:
    refresh(store, schedule.name, position := Position())
    if position.last is not None:
        position.end = read_end(store, schedule.name, position.last.number)
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
