"""The world of episodes of schedules: its recipes, its source, a store with a past, and what the machine is not asked.

A grace period of a day is six minutes here, and what is scaled with it keeps its order: a driver looks for a new record
of a gc more often, and no job lives longer.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import cache, lru_cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic import BaseModel

from pipelines import identity
from pipelines.commands import aliases
from pipelines.engine import driver
from pipelines.engine.driver import Driver
from pipelines.engine.runs import start_run
from pipelines.environment import environment, using
from pipelines.recipe.load import parse_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.schedules import schedule
from pipelines.schedules.cron import last_tick, ticks
from pipelines.schedules.schedule import Reach, Schedule
from pipelines.spec import AnyStage
from pipelines.store import Attempt, Store, artifacts, keeping
from tests.simulation.cluster import Client, Script, SimulatedCluster
from tests.simulation.loop import Loop, Process
from tests.support.memory_store import MemoryStore
from tests.support.world import DIGITS, Told
from vit_model.fields import Frozen

MONTH = 40 * 86_400.0
GC_LOOK_SECONDS = 100.0  # between a driver's looks for a record of a gc
SOURCES = range(7)  # states of the folder that is ingested; the past has seen the first ones
NAME, ALIAS = "often", "production"

TRAIN = {"job": "pretrain", "data": "images", "model": "Ti/16", "resolution": 224, "init_from": f"@{ALIAS}"}
TRAIN |= {"steps": 20, "batch_size": 12, "learning_rate": 1e-3}
FROZEN = DIGITS | {"max_bad_fraction": 0.5}
PROMOTE = {"job": "promote", "data": "frozen", "candidate": "train", "against": f"@{ALIAS}", "floor": 0.5}
STAGES = {
    "pixels": {"images": DIGITS, "pixels": {"job": "baselines", "data": "images"}},
    "promote": {"images": DIGITS, "frozen": FROZEN, "train": TRAIN, "promote": PROMOTE},
}


@cache
def recipe(kind: str, name: str = "some", steps: int = 20) -> Pipeline:
    """A recipe of one of the kinds in STAGES."""
    stages = {each: fields | ({"steps": steps} if each == "train" else {}) for each, fields in STAGES[kind].items()}
    return parse_pipeline({"name": name, "stages": stages}, "test")


def verdict(attempt: Attempt) -> dict[str, str]:
    """What a comparison says: the same whenever it is made."""
    chosen = ("promoted", "promoted", "worse", "not shown")[int(identity.sha256(attempt.key)[:2], 16) % 4]
    return {"verdict": chosen, "reason": "so it is"} if attempt.job == "promote" else {}


class Source:
    """The state of the folder that `images` ingests; `frozen` never changes."""

    number = 0

    def of(self, config: AnyStage, *_: object) -> tuple[str | None, tuple[str, ...]]:
        """What `identity.listed_source` returns."""
        if config.job != "ingest":
            return None, ()
        return "frozen" if config.max_bad_fraction == FROZEN["max_bad_fraction"] else f"state {self.number}", ()


class Reached(Reach):
    """A server's way to the cluster, and to the people who want notices."""

    def __init__(self, client: Client, send: Callable[[Any], None]) -> None:
        super().__init__(None, send)
        object.__setattr__(self, "client", client)

    client: Client

    @contextmanager
    def target(self, _: Schedule) -> Iterator[tuple[Any, Path | None]]:
        self.client.session_name  # noqa: B018 (sends a request)
        yield self.client, None

    def clusters(self, _: Schedule) -> Callable[[str], Any]:
        return lambda _: self.client


@cache
def past(kind: str) -> tuple[dict[str, bytes], float]:
    """A store's objects after five calm runs, and the time a month later."""
    source, loop = Source(), Loop(1e9)
    store: Any = MemoryStore()
    cluster = SimulatedCluster(loop, store, lambda attempt: Script(metrics=verdict(attempt)))
    with world(source):
        for number in range(5):
            source.number = number
            with using(Process(loop, f"p{number}")):
                begun = start_run(store, recipe(kind), tuple(STAGES[kind]))
                Driver(store, begun, Client(cluster), Told(loop), parallel=4).walk()
            loop.sleep(86_400.0)
    loop.sleep(MONTH)
    return store.objects, loop.now


CRONS = {"* * * * *": 60, "*/2 * * * *": 120, "*/5 * * * *": 300}  # lines, and their seconds


def quick_ticks(cron: str, timezone: str, after: datetime) -> Iterator[datetime]:
    """What `cron.ticks` yields; reading a line takes longer than all else that a server does."""
    if cron not in CRONS:
        yield from ticks(cron, timezone, after)
    step = CRONS[cron]
    for number in count(int(after.timestamp()) // step + 1):
        yield datetime.fromtimestamp(number * step, UTC)


def quick_last_tick(cron: str, timezone: str, since: datetime, now: datetime) -> datetime | None:
    """What `cron.last_tick` returns."""
    if cron not in CRONS:
        return last_tick(cron, timezone, since, now)
    latest = datetime.fromtimestamp(int(now.timestamp()) // CRONS[cron] * CRONS[cron], UTC)
    return latest if latest > since else None


@lru_cache(10_000)
def parse(model: Any, data: bytes) -> Any:
    """Parse a record, once: records are immutable, and parsing them takes most of the time."""
    return BaseModel.model_validate_json.__func__(model, data)  # type: ignore[attr-defined]


@contextmanager
def world(source: Source) -> Iterator[None]:
    """Run the project's code in this world: its constants of time in proportion, its sources, and no machine."""

    def uncached(store: Any, folder: str, versions: Any, model: Any, read: Any) -> Iterator[Any]:
        yield from (found.record for found in sorted(read(sorted(versions)), key=lambda each: each.position))

    with ExitStack() as stack:
        for module, name, value in (
            (driver, "POLL_SECONDS", 1.0),
            (keeping, "LOOK_SECONDS", GC_LOOK_SECONDS),
            (identity, "listed_source", source.of),
            (identity, "source_fingerprint", lambda config: source.of(config)[0]),
            (identity, "git_state", dict),  # each commit would start git
            (artifacts, "listed", uncached),  # the catalog is a file of this machine, and has its own tests
            (aliases, "open_", lambda *_, **__: opened()),
            (signal, "signal", lambda *_: None),
            (schedule, "ticks", quick_ticks),
            (schedule, "last_tick", quick_last_tick),
            (Frozen, "model_validate_json", classmethod(parse)),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


def opened() -> Store:
    """The store of a person's process."""
    process: Any = environment()
    return process.store
