"""Runs in MLflow, from the logs of trainings: each training, or each fit of a fine-tuning, is an MLflow run.

A tag, `vitflow.training`, names the training, so that a second export finds its run. An export first reads the run's
metrics and adds the missing points; if the run has a point that the log does not, because steps were repeated after a
kill, a new run replaces it. So after each export the metrics equal the log, even if an earlier export was interrupted.
MLflow's own client talks to the server and finds its credentials.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run

from pipelines.results.event_files import scalars
from pipelines.store import LogLine

_TRAINING = "vitflow.training"
_METRICS, _PARAMS = 1000, 100  # in one request, as MLflow allows
_LONGEST = 500  # characters of a parameter, in old servers
Point = tuple[str, int, float]  # tag, step, value


class MlflowRuns:
    """Writes trainings into the experiment of this name, and creates it if needed.

    Raises:
        MlflowException: the server refuses, or does not answer.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(experiment)
        self._experiment = self._client.create_experiment(experiment) if known is None else known.experiment_id

    def update(
        self,
        training: str,
        name: str,
        config: Mapping[str, Any],
        tags: Mapping[str, str],
        lines: Iterable[LogLine],
    ) -> int:
        """Write the new points of a training's whole log, and return the number of lines with new points.

        Args:
            training: names the training in all runs, for example its key.
        """
        lines = list(lines)
        points = {(tag, line.step, value): line for line in lines for tag, value in scalars(line).items()}
        run = self._find(training)
        written = Counter[Point]() if run is None else self._points(run)
        # steps were repeated, and MLflow deletes runs only
        if run is not None and written - Counter(points.keys()):
            self._client.delete_run(run.info.run_id)
            run, written = None, Counter()
        if run is None:
            begun = min(map(_milliseconds, lines))
            run = self._create(name, {**tags, _TRAINING: training}, begun, config)
        new = {point: line for point, line in points.items() if point not in written}
        metrics = [Metric(tag, value, _milliseconds(line), step) for (tag, step, value), line in new.items()]
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(run.info.run_id, metrics=metrics[start : start + _METRICS])
        return len({line.step for line in new.values()})

    def _points(self, run: Run) -> Counter[Point]:
        """Return the points of an MLflow run with their counts."""
        return Counter(
            (tag, metric.step, metric.value)
            for tag in run.data.metrics
            for metric in self._client.get_metric_history(run.info.run_id, tag)
        )

    def _find(self, training: str) -> Run | None:
        """Return the MLflow run of a training."""
        condition = f"tags.`{_TRAINING}` = '{training}'"
        runs = self._client.search_runs([self._experiment], condition, max_results=1)
        return runs[0] if runs else None

    def _create(self, name: str, tags: dict[str, str], begun: int, config: Mapping[str, Any]) -> Run:
        """Create an MLflow run with a stage's fields as its parameters; it began at this time, in ms."""
        run = self._client.create_run(self._experiment, start_time=begun, tags=tags, run_name=name)
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in config.items()}
        params = [Param(name, text[:_LONGEST]) for name, text in texts.items()]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(run.info.run_id, params=params[start : start + _PARAMS])
        return run


def _milliseconds(line: LogLine) -> int:
    return int(datetime.fromisoformat(line.time).timestamp() * 1000)
