"""The runs in a store: their ids, how they ended, and what one recipe's runs made, newest first.

A run's id is RECIPE-YYYYmmdd-HHMMSS-SUFFIX, so a request or two list a recipe's newest runs, however many runs there
are. A run that is over has the state of all its stages in one object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import cache, partial
from itertools import islice
from typing import Any

from pipelines.engine.status import COMMITTED, Status
from pipelines.environment import environment
from pipelines.store import (
    InputRef,
    Layout,
    Manifest,
    Over,
    Store,
    StoreDamaged,
    create_over,
    now,
    read_events,
    read_or_warn,
    read_overs,
    read_plan,
    warn,
)

RECENT = 20  # runs in which a plan looks for earlier results, and a start for one to continue
READERS = 16  # records read at once: on S3 each takes a round trip

Results = dict[str, tuple[Manifest, InputRef]]
"""Stage -> its newest result, and the reference to it."""


def recipe_of(run: str) -> str:
    """Return the name of the recipe of the run with this id."""
    return run.rsplit("-", 3)[0]


def runs(store: Store, prefix: str = "") -> list[str]:
    """Return the ids of all runs, or of those whose id begins with `prefix`, oldest first."""
    return sorted(filter(is_run, store.names("runs", prefix)), key=position_of)


def is_run(name: str) -> bool:
    """Whether a name has the form of a run's id."""
    return name.count("-") >= 3


def position_of(run: str) -> str:
    """Return the end of a run's id, by which runs are sorted: its time."""
    return "-".join(run.rsplit("-", 3)[1:])


def plan_of(store: Store, run: str) -> dict[str, Any] | None:
    """Return a run's plan; None if it is damaged, which a warning says, or absent: its driver was killed before it."""
    try:
        return read_plan(store, run)
    except StoreDamaged as error:
        warn(f"{error}; ignoring this run")
        return None


def runs_of(store: Store, recipe: str) -> Iterator[str]:
    """Yield the ids of one recipe's runs, newest first; list the older ones only when they are needed."""
    listed: set[str] = set()
    for day in days_back():
        # the first digit of the year keeps out recipes whose names begin with this one's
        names = store.names("runs", f"{recipe}-2", day and f"{recipe}-{day}")
        found = [name for name in names if recipe_of(name) == recipe and name not in listed]
        yield from reversed(found)
        listed.update(found)


def days_back() -> Iterator[str]:
    """Yield days, such as 20261126, after which to list names that begin with a date: recent, less recent, all ("")."""
    today = environment().utc()
    for days in (2, 60):
        yield f"{today - timedelta(days):%Y%m%d}"
    yield ""


def is_over(store: Store, run: str) -> bool:
    """Whether a run has ended or was requested to stop."""
    return bool({"over.json", "stop.json"} & {*store.names(Layout.run(run))})


def end_run(store: Store, run: str, status: str, detail: str = "") -> None:
    """Record that a run is over, with the state of its stages; the first record counts."""
    record = read_plan(store, run)
    assert record is not None
    stages = stages_of(record, read_events(store, run))
    over = {"status": status, "time": now(), "detail": detail, "stages": stages}
    create_over(store, run, Over.model_validate(over))


def stages_of(plan: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the state of each stage of a run's plan by the drivers' events, in running order.

    Later events override earlier ones. But several drivers may follow one stage, and one of them may be late: what is
    committed stays so, and the end of an attempt says nothing about the attempts after it.
    """
    stages: dict[str, dict[str, Any]] = {
        name: {"stage": name, "job": plan["pipeline"]["stages"][name]["job"], "status": Status.PENDING}
        for name in plan["stages"]
    }
    for event in events:
        if event["event"] not in {"stage", "attempt ended"} or event["stage"] not in stages:
            continue
        stage, is_end = stages[event["stage"]], event["event"] == "attempt ended"
        if stage["status"] in COMMITTED and (is_end or event.get("key") == stage.get("key")):
            continue
        number = stage.get("attempt", 0)
        if is_end and event.get("attempt", number) < number:
            continue
        stage.update({name: value for name, value in event.items() if name not in {"event", "time"}})
        if event["status"] == Status.RUNNING:
            stage.setdefault("started", event["time"])
        stage["changed"] = event["time"]
    return list(stages.values())


def stage_keys(store: Store, runs: Iterable[str]) -> Iterator[dict[str, tuple[str, str] | None]]:
    """Yield {stage: (job, key)} of each run, in the order of `runs`; None: its key is not known yet.

    Runs are read a few at once, more the further it goes.
    """
    remaining, size = iter(runs), 1
    while chunk := list(islice(remaining, size)):
        for run, over in zip(chunk, read_overs(store, chunk), strict=True):
            stages = _so_far(store, run) if over is None else over.model_dump(exclude_unset=True)["stages"]
            yield {stage["stage"]: (stage["job"], stage["key"]) if stage.get("key") else None for stage in stages}
        size = min(4 * size, READERS)


def _so_far(store: Store, run: str) -> list[dict[str, Any]]:
    """Return the state of the stages of a run that is not over."""
    record = plan_of(store, run)
    return [] if record is None else stages_of(record, read_events(store, run))


def newest_results(
    store: Store,
    runs: Iterable[str],
    jobs: Mapping[str, str],
    is_usable: Callable[[Manifest], bool] = lambda _: True,
) -> Results:
    """Return the result of each stage in the newest run that has a usable one.

    Args:
        runs: ids, newest first.
        jobs: stage -> its job.
    """
    found: Results = {}
    if not jobs:
        return found
    read_once = cache(partial(read_or_warn, store))  # runs and stages may share results
    for keys in stage_keys(store, runs):
        for stage in jobs.keys() & keys.keys() - found.keys():
            artifact = keys[stage]
            if artifact is None or artifact[0] != jobs[stage]:
                continue
            if (result := read_once(*artifact)) is not None and is_usable(result[0]):
                found[stage] = result
        if len(found) == len(jobs):
            break
    return found
