"""The trainings of a run: which stages they are, their logs, and how far those that run have come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.engine.status import Status
from pipelines.store import LogLine, Store, describe_line, read_log, read_plan

_JOBS = ("pretrain", "finetune")


@dataclass(frozen=True)
class Training:
    """A stage that trains. `segments` are those of its log that were read, see `read_log`."""

    stage: str
    job: str
    key: str
    config: dict[str, Any]
    segments: dict[str, list[LogLine]] = field(default_factory=dict)

    def log(self, store: Store) -> list[LogLine]:
        """Read its log."""
        return read_log(store, self.job, self.key, self.segments)

    def title(self, fit: str | None) -> str:
        """Name one of its fits: `learning rate 0.001, fold 0`, `draw 0`; empty for a pretraining."""
        if fit is None:
            return ""
        kind, rate, *_, number = fit.split("-")
        if kind == "refit":
            return f"draw {number}"
        if (place := self._round(fit)) is not None:
            return f"trial {rate}, round {place}"
        if self.config.get("search"):
            return f"trial {rate}, fold {number}"
        return f"learning rate {self.config['learning_rates'][int(rate)]:g}, fold {number}"

    def steps(self, fit: str | None) -> int:
        """Return the last step of one of its fits; a refit's name has its own if trials may stop early."""
        steps, parts = int(self.config["steps"]), (fit or "").split("-")
        if (place := self._round(fit)) is not None:
            return math.ceil(steps * place / int(self.config["search"]["rounds"]))
        return int(parts[-2]) if len(parts) > 3 and parts[-2].isdecimal() else steps

    def _round(self, fit: str | None) -> int | None:
        """Return the round of PBT, from 1, that a fit is; None if it is none."""
        if (self.config.get("search") or {}).get("kind") != "pbt" or not (fit or "").startswith("trial-"):
            return None
        return int(str(fit).split("-")[2]) + 1

    def may_end_before(self, fit: str | None) -> bool:
        """Return whether one of its fits may end before its last step: a trial with early stopping."""
        return self.config.get("early_stopping") is not None and (fit or "").startswith("trial-")


class Trainings:
    """The trainings of a run, which keep what was read of their logs."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        plan = read_plan(store, run)
        assert plan is not None
        self._configs: dict[str, dict[str, Any]] = plan["pipeline"]["stages"]
        self._known: dict[tuple[str, str], Training] = {}

    def of(self, status: dict[str, Any]) -> list[Training]:
        """Return those that have begun or are cached; `status` is the run's (`run_status`)."""
        return [
            self._training(entry["stage"], entry["key"])
            for entry in status["stages"]
            if "key" in entry and self._configs[entry["stage"]]["job"] in _JOBS
        ]

    def add_progress(self, status: dict[str, Any]) -> None:
        """Add `progress`, and `detail` in words, to each training that runs and has said something."""
        running = {entry["stage"]: entry for entry in status["stages"] if entry["status"] == Status.RUNNING}
        for training in self.of(status):
            if training.stage in running and (lines := training.log(self._store)):
                latest = max(lines, key=lambda line: line.time)
                steps = training.steps(latest.fit)
                entry = running[training.stage]
                entry["progress"] = {"steps": steps, **latest.model_dump(mode="json")}
                title = training.title(latest.fit)
                noun = f"{title}, step" if title else "step"
                entry["detail"] = describe_line(latest, steps, noun, training.may_end_before(latest.fit))

    def _training(self, stage: str, key: str) -> Training:
        config = self._configs[stage]
        return self._known.setdefault((stage, key), Training(stage, config["job"], key, config))


def by_fit(lines: Sequence[LogLine]) -> dict[str | None, list[LogLine]]:
    """Return the lines of each fit."""
    fits: dict[str | None, list[LogLine]] = {}
    for line in lines:
        fits.setdefault(line.fit, []).append(line)
    return fits
