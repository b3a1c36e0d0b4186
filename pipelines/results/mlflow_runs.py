"""Runs in MLflow, from the logs of trainings: each training, or each fit of a fine-tuning, is an MLflow run.

A tag, `vitflow.training`, names the training, so that a second export adds only the lines that are new. The server is
asked through MLflow's own client, which finds its credentials.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run

from pipelines.results.event_files import scalars
from pipelines.store import LogLine

_TRAINING, _UNTIL = "vitflow.training", "vitflow.until"
_METRICS, _PARAMS = 1000, 100  # in one request, as MLflow allows
_LONGEST = 500  # characters of a parameter, in old servers


class MlflowRuns:
    """Writes trainings into the experiment of this name, and creates it if needed.

    Raises:
        MlflowException: the server refuses, or does not answer.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(experiment)
        self._experiment = (
            self._client.create_experiment(experiment) if known is None else known.experiment_id
        )

    def update(
        self,
        training: str,
        name: str,
        config: Mapping[str, Any],
        tags: Mapping[str, str],
        lines: Iterable[LogLine],
    ) -> int:
        """Write the lines that are new, and return how many.

        Args:
            training: names the training in all runs, for example its key.
        """
        lines = list(lines)
        run = self._find(training)
        if run is None:
            begun = min(map(_milliseconds, lines))
            run = self._create(name, {**tags, _TRAINING: training}, begun, config)
        until = run.data.tags.get(_UNTIL, "")
        new = sorted((line for line in lines if line.time > until), key=lambda line: line.time)
        metrics = [
            Metric(tag, value, _milliseconds(line), line.step)
            for line in new
            for tag, value in scalars(line).items()
        ]
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(run.info.run_id, metrics=metrics[start : start + _METRICS])
        if new:
            self._client.set_tag(run.info.run_id, _UNTIL, new[-1].time)
        return len(new)

    def _find(self, training: str) -> Run | None:
        """Return the MLflow run of a training."""
        named = f"tags.`{_TRAINING}` = '{training}'"
        found = self._client.search_runs([self._experiment], named, max_results=1)
        return found[0] if found else None

    def _create(self, name: str, tags: dict[str, str], begun: int, config: Mapping[str, Any]) -> Run:
        """Create an MLflow run with a stage's fields as its parameters; it began at this time, in ms."""
        run = self._client.create_run(self._experiment, start_time=begun, tags=tags, run_name=name)
        texts = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in config.items()
        }
        params = [Param(name, text[:_LONGEST]) for name, text in texts.items()]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(run.info.run_id, params=params[start : start + _PARAMS])
        return run


def _milliseconds(line: LogLine) -> int:
    return int(datetime.fromisoformat(line.time).timestamp() * 1000)
