"""What a training's gauges say after each line of its log."""

from typing import Any

import pytest

from pipelines.store import create_attempt
from ray_jobs.training import log
from ray_jobs.training.log import LogWriter
from ray_jobs.training.task import Evaluation
from tests.support.memory_store import MemoryStore
from tests.support.records import make_attempt
from tests.support.trainings import line


class Metrics:
    """In place of Ray's: {(name, tags): value}."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.tags: list[dict[str, str]] = []

    def gauge(self, name: str, description: str, tag_keys: tuple[str, ...]) -> Any:
        return self.Gauge(self, name, tag_keys)

    class Gauge:
        def __init__(self, metrics: "Metrics", name: str, tag_keys: tuple[str, ...]) -> None:
            self.metrics, self.name, self.tag_keys = metrics, name, tag_keys

        def set_default_tags(self, tags: dict[str, str]) -> None:
            assert set(tags) == set(self.tag_keys) and all(isinstance(tag, str) for tag in tags.values())
            self.metrics.tags.append(tags)

        def set(self, value: float) -> None:
            self.metrics.values[self.name.removeprefix("vitflow_")] = value


def test_gauges_have_the_last_value_of_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    monkeypatch.setattr(log, "Gauge", metrics.gauge)
    store, attempt = MemoryStore(), make_attempt("pretrain", number=3)
    create_attempt(store, attempt)
    writer = LogWriter(store, attempt, "refit-0-1", log.Gauges(attempt, "refit-0-1").show)
    writer.add(line(8))
    writer.add_evaluation(Evaluation(1, 0.5, 0.25))
    writer.add(line(16, mfu=None))
    last = line(16).model_dump(exclude={"time", "fit", "few_shot", "measures"})
    assert metrics.values == last | {"mfu": line(8).mfu, "dev_loss": 0.25, "dev_accuracy": 0.5}
    expected = {"run": attempt.run, "stage": attempt.stage, "key": attempt.key, "attempt": "3"}
    assert metrics.tags[0] == expected | {"fit": "refit-0-1"}
