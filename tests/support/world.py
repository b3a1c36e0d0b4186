"""Everything that a driver under test works on: a store, a cluster and a clock, and runs of a small pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

from pipelines.engine.driver import Driver
from pipelines.engine.plan import PlannedStage, plan_stage
from pipelines.engine.runs import start_run
from pipelines.engine.status import Status
from pipelines.environment import Environment, using
from pipelines.recipe.load import parse_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.store import Attempt, Layout, Manifest, read_events, read_over
from tests.simulation.cluster import Client, Script, SimulatedCluster
from tests.simulation.loop import Loop, Process
from tests.support.memory_store import MemoryStore
from tests.support.network import Network

DIGITS = {"job": "ingest", "source": {"kind": "digits"}}


@cache
def pipeline(*stages: str) -> Pipeline:
    """These of: images, other (a dataset), pixels and model (of images), more (of other), report (of pixels), both."""
    known: dict[str, dict[str, Any]] = {
        "images": DIGITS,
        "other": DIGITS | {"max_bad_fraction": 0.5},
        "pixels": {"job": "baselines", "data": "images"},
        "model": {"job": "pretrain", "data": "images", "model": "Ti/16", "resolution": 224}
        | {"steps": 20, "batch_size": 12, "learning_rate": 1e-3},
        "more": {"job": "baselines", "data": "other"},
        "report": {"job": "report", "title": "Some", "of": ["pixels"]},
        "both": {"job": "report", "title": "Both", "of": ["pixels", "more"]},
    }
    return parse_pipeline({"name": "some", "stages": {name: known[name] for name in stages}}, "test")


def first_key() -> str:
    """The key of the stage `images`."""
    key = plan_stage(MemoryStore(), "images", pipeline("images").stages["images"], {}).key
    assert key is not None
    return key


@dataclass
class Told:
    """A display that keeps what it was told: (time, stage, status, detail), and other lines."""

    clock: Loop
    stages: list[tuple[float, str, str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def stage(self, name: str, status: Status, detail: str = "") -> None:
        assert isinstance(status, Status)
        self.stages.append((self.clock.now, name, status.value, detail))

    def line(self, name: str, text: str) -> None:
        """The fake cluster's logs are not followed."""

    def say(self, text: str) -> None:
        self.lines.append(text)

    def of(self, stage: str) -> list[str]:
        """What was told of a stage, without the times."""
        return [f"{status} {detail}".strip() for _, name, status, detail in self.stages if name == stage]


def manifests_of(objects: Mapping[str, bytes]) -> dict[str, Manifest]:
    """Return the manifests of artifacts among a store's objects, by stage."""
    names = [name for name in objects if name.startswith("artifacts/") and name.endswith("/manifest.json")]
    found = [Manifest.model_validate_json(objects[name]) for name in names]
    return {manifest.stage: manifest for manifest in found}


class DriverOf(Driver):
    """A driver whose every step is a process's."""

    environment: Environment

    def walk(self) -> tuple[dict[str, Status], list[PlannedStage]]:
        with using(self.environment):
            return super().walk()

    def step(self) -> bool:
        with using(self.environment):
            return super().step()


class World:
    """A store, a cluster, a clock; drivers come and go."""

    def __init__(
        self, *stages: str, script: Callable[[Attempt], Script] = lambda attempt: Script(), limit: float = 1e6
    ) -> None:
        self.pipeline = pipeline(*(stages or ("images",)))
        self.clock = Loop(limit)
        self.store = MemoryStore()
        self.cluster = SimulatedCluster(self.clock, self.store, script)
        self.told = Told(self.clock)
        self._drivers, self._runs = count(1), count(1)

    def new_run(self) -> str:
        return f"some-20261122-120000-{next(self._runs):04d}"

    def driver(self, network: Network | None = None, run: str = "some-20261122-120000-0000") -> Driver:
        """A new process that drives a run, which it begins or continues; its nonces begin with its number."""
        network = network or Network()
        targets = tuple(self.pipeline.stages)
        begun = start_run(self.store, self.pipeline, targets, run_id=run)
        store, client = MemoryStore(self.store.objects, network), Client(self.cluster, network)
        driver = DriverOf(store, begun, client, self.told, parallel=4)
        driver.environment = Process(self.clock, str(next(self._drivers)))
        return driver

    def attempts(self, job: str = "ingest") -> list[Attempt]:
        """Their records, as they were written."""
        return [
            Attempt.model_validate_json(data)
            for name, data in self.store.objects.items()
            if name.startswith(f"artifacts/{job}/") and name.endswith("attempt.json")
        ]

    def manifests(self) -> dict[str, Manifest]:
        """By stage."""
        return manifests_of(self.store.objects)

    def log(self, attempt: Attempt) -> str:
        name = f"{Layout.attempt(attempt.job, attempt.key, attempt.number)}/log.txt"
        return self.store.objects[name].decode()

    def events(self, run: str = "some-20261122-120000-0000") -> list[str]:
        """What the run's events and the record of its end say, in short."""
        said = [
            " ".join(str(event[name]) for name in ("event", "stage", "status") if name in event)
            for event in read_events(self.store, run)
        ]
        over = read_over(self.store, run)
        return said if over is None else [*said, f"finished {over.status}"]

    def stop_wish(self, run: str = "some-20261122-120000-0000") -> dict[str, Any] | None:
        data = self.store.objects.get(f"{Layout.run(run)}/stop.json")
        return None if data is None else dict(json.loads(data))
