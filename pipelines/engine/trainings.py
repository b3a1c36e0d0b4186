"""The trainings of a run: their stages, their logs, and the progress of those that run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipelines.engine.status import Status
from pipelines.spec import FINE_TUNED, TRAINED
from pipelines.store import (
    FitName,
    LogLine,
    Store,
    StoreDamaged,
    describe_line,
    last_attempt,
    read_log,
    read_manifest,
    read_plan,
    running_log,
)


@dataclass(frozen=True)
class Training:
    """A stage that trains. `segments` caches the segments of its log, see `read_log`."""

    stage: str
    job: str
    key: str
    config: dict[str, Any]
    has_folds: bool = False
    segments: dict[str, list[LogLine]] = field(default_factory=dict)

    def fits(self, store: Store) -> list[tuple[str | None, str, list[LogLine]]]:
        """Read its log; return each fit's name in it, its title with the stage's name, and its lines."""
        lines: dict[str | None, list[LogLine]] = {}
        for line in read_log(store, self.job, self.key, self.segments):
            lines.setdefault(line.fit, []).append(line)
        return [(fit, "/".join(filter(None, (self.stage, self.title(fit)))), own) for fit, own in lines.items()]

    def title(self, fit: str | None) -> str:
        """Name one of its fits: `learning rate 0.001, fold 0`, `draw 0` or a single `refit`; empty for a pretraining.

        A fit with an unknown name keeps the name from the log, because any program may write into a log.
        """
        name = FitName.parse(fit)
        rates, has_search = self.config.get("learning_rates", ()), bool(self.config.get("search"))
        if name is None or (name.kind == "trial" and not has_search and name.number >= len(rates)):
            return fit or ""
        if name.kind == "refit":
            return f"draw {name.part}" if name.part or self._has_draws else "refit"
        title = f"trial {name.number}" if has_search else f"learning rate {rates[name.number]:g}"
        return f"{title}, fold {name.part}" if self.has_folds or name.part else title

    @property
    def _has_draws(self) -> bool:
        labels = self.config.get("labels", {})
        draws = self.config.get("refits", 1) if labels.get("per_class") is None else labels["draws"]
        return int(draws) > 1

    def steps(self, fit: str | None) -> int:
        """Return the last step of one of its fits; a refit's name contains it if trials may stop early."""
        name = FitName.parse(fit)
        return int((name and name.last_step) or self.config["steps"])

    def may_end_before(self, fit: str | None) -> bool:
        """Return whether one of its fits may end before its last step: a trial with early stopping."""
        name = FitName.parse(fit)
        return self.config.get("early_stopping") is not None and name is not None and name.kind == "trial"


class Trainings:
    """The trainings of a run, with a cache of their logs."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        plan = read_plan(store, run)
        assert plan is not None
        self._configs: dict[str, dict[str, Any]] = plan["pipeline"]["stages"]
        self._known: dict[tuple[str, str], Training] = {}

    def of(self, status: dict[str, Any]) -> list[Training]:
        """Return the trainings that have begun or are cached; `status` is the run's (`run_status`)."""
        return [
            self._training(entry["stage"], entry["key"])
            for entry in status["stages"]
            if "key" in entry and self._configs[entry["stage"]]["job"] in TRAINED
        ]

    def add_progress(self, status: dict[str, Any]) -> None:
        """Add `progress`, and `detail` as text, to each running training whose attempt has a log."""
        running = {entry["stage"]: entry for entry in status["stages"] if entry["status"] == Status.RUNNING}
        for training in self.of(status):
            if (entry := running.get(training.stage)) is None:
                continue
            # an earlier attempt may have been further than the checkpoint that this one starts from
            place = training.job, training.key, training.segments, entry.get("attempt")
            if lines := running_log(self._store, *place):
                latest = max(lines, key=lambda line: line.time)
                steps = training.steps(latest.fit)
                entry["progress"] = {"steps": steps, **latest.model_dump(mode="json")}
                title = training.title(latest.fit)
                unit = f"{title}, step" if title else "step"
                entry["detail"] = describe_line(latest, steps, unit, training.may_end_before(latest.fit))

    def _training(self, stage: str, key: str) -> Training:
        if (stage, key) not in self._known:
            config = self._configs[stage]
            has_folds = config["job"] in FINE_TUNED and _has_folds(self._store, key, config)
            self._known[stage, key] = Training(stage, config["job"], key, config, has_folds)
        return self._known[stage, key]


def _has_folds(store: Store, key: str, config: dict[str, Any]) -> bool:
    """Return whether a fine-tuning selects its settings on folds; False if its data set is no longer readable."""
    labels = config["labels"]
    if labels["per_class"] is not None or not labels.get("use_dev", True):
        return True
    try:
        attempt = last_attempt(store, config["job"], key)
        data = attempt.inputs.get("data") if attempt else None
        manifest = read_manifest(store, data[0].job, data[0].key) if data else None
    except StoreDamaged:  # `verify` reports it; here only the word "fold" is missing
        return False
    return manifest is not None and manifest.metrics.get("dev") == 0
