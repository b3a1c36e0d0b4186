"""A store's objects in an episode of schedules: what must hold of aliases, ticks and gc, at each write and at last."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pipelines.engine.gc import ALIAS_DEPTH, Policy
from pipelines.engine.history import position_of, recipe_of
from pipelines.schedules.due import DRIVERS
from pipelines.schedules.notices import SKIPS
from pipelines.schedules.ticks import End, Tick
from pipelines.store import Alias, Manifest, Over
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.loop import Loop
from tests.support.memory_store import Objects

POLICY = Policy(keep_runs=1, keep_days=0.1)
REPLACED = ("alive.json",)  # objects that are written again and again
Artifact = tuple[str, str]


class Watched(Objects):
    """A store's objects, when each was first written, and what has been removed."""

    cluster: SimulatedCluster

    def __init__(self, loop: Loop, objects: Mapping[str, bytes]) -> None:
        super().__init__(objects)
        self.loop = loop
        self.since = dict.fromkeys(objects, 0.0)
        self.manifests: dict[Artifact, Manifest] = {}
        """All that were ever committed."""
        for name, data in objects.items():
            self._note_manifest(name, data)
        self.deleted: set[Artifact] = set()
        self.stopped: set[str] = set()  # runs that a person wanted to stop
        self.faults: list[str] = []  # that nobody may catch

    # ------------------------------------------------------------------------------------------- each write

    def setdefault(self, name: str, data: bytes = b"") -> bytes:  # type: ignore[override]
        if name not in self:
            self._check_new(name, data)
            self.since[name] = self.loop.now
        return super().setdefault(name, data)

    def update(self, objects: Mapping[str, bytes]) -> None:  # type: ignore[override]
        for name in objects:
            self._require(name.endswith(REPLACED) or name not in self, f"{name} was overwritten")
        super().update(objects)

    def pop(self, name: str, default: Any = None) -> Any:
        if name in self:
            self._check_removal(name)
        return super().pop(name, default)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            self.faults.append(what)
            raise AssertionError(what)

    def _note_manifest(self, name: str, data: bytes) -> None:
        if name.startswith("artifacts/") and name.endswith("/manifest.json"):
            made = Manifest.model_validate_json(data)
            self.manifests[made.job, made.key] = made

    def _check_new(self, name: str, data: bytes) -> None:
        parts = name.split("/")
        if parts[0] == "artifacts" and parts[-1] in {"manifest.json", "attempt.json"}:
            self._require((parts[1], parts[2]) not in self.deleted, f"{name}: a deleted key is used again")
            self._note_manifest(name, data)
        elif parts[0] == "schedules" and parts[2:3] == ["ticks"]:
            tick = Tick.model_validate_json(data)
            if tick.decision == "run":
                self._check_alone(parts[1], tick)
        elif parts[0] == "runs" and parts[-1] == "over.json":
            self._check_given_up(parts[1], Over.model_validate_json(data).detail)

    def _check_given_up(self, run: str, detail: str) -> None:
        """A run is given up only if three of its drivers have died; one that is PENDING sees the end."""
        if "drivers died" in detail:
            drivers = {name for _, name in self.cluster.arrived if name.startswith(f"driver-{run}-")}
            jobs = [job for job in self.cluster.jobs.values() if job.submission_id in drivers]
            lives = any(job.status == "RUNNING" and not job.process.is_dead for job in jobs)
            self._require(not lives and len(drivers) >= DRIVERS, f"{run} is given up early: {sorted(drivers)}")

    def _check_alone(self, schedule: str, tick: Tick) -> None:
        """A run begins after the end of the one before was recorded."""
        for earlier in self.ticks(schedule):
            if earlier.decision == "run" and earlier.number < tick.number:
                end = f"schedules/{schedule}/ends/{earlier.number:08d}.json"
                self._require(end in self, f"tick {tick.number} begins a run beside that of {earlier.number}")
                self._require(f"runs/{earlier.run}/over.json" in self, f"tick {earlier.number} has an end too early")

    def _check_removal(self, name: str) -> None:
        parts = name.split("/")
        if parts[0] == "schedules" and parts[2] == "notices":
            return
        self._require(parts[0] == "artifacts", f"{name} was removed")
        artifact = (parts[1], parts[2])
        manifest = f"artifacts/{parts[1]}/{parts[2]}/manifest.json"
        self._require(name == manifest or manifest not in self, f"{name} was removed before its manifest")
        self._require(parts[-1] != "replaced.json", f"{name} was removed")
        for job in self.cluster.started:
            attempt, lives = job.attempt, not (job.process.is_dead or job.ended)
            if attempt is not None and lives:
                self._require((attempt.job, attempt.key) != artifact, f"{name} was removed while it was being made")
        if name == manifest:
            needed = {**self.named(), **self.taken(), **self.used(self._decided(artifact))}
            self._require(artifact not in needed, f"{name} was removed, but {needed.get(artifact)}")
            self._require(not self._is_kept(artifact), f"{name} was removed, although a run had kept it")
            self.deleted.add(artifact)

    # ------------------------------------------------------------------------------------------- what is needed

    def _closure(self, roots: Mapping[Artifact, str]) -> dict[Artifact, str]:
        found, pending = dict(roots), list(roots)
        while pending:
            artifact = pending.pop()
            if artifact in self.manifests:
                for references in self.manifests[artifact].inputs.values():
                    for each in references:
                        if (each.job, each.key) not in found:
                            found[each.job, each.key] = f"{found[artifact]}, and this leads to it"
                            pending.append((each.job, each.key))
        return found

    def named(self) -> dict[Artifact, str]:
        """What aliases name, or named lately."""
        roots: dict[Artifact, str] = {}
        for name, moves in self.aliases().items():
            for move in moves[-ALIAS_DEPTH:]:
                if move.target is not None:
                    roots[move.target.job, move.target.key] = f"@{name} names it"
                if move.report is not None:
                    roots["promote", move.report] = f"it moved @{name}"
        return self._closure(roots)

    def taken(self) -> dict[Artifact, str]:
        """What running jobs take."""
        running = [
            job.attempt for job in self.cluster.started if job.attempt and not (job.process.is_dead or job.ended)
        ]
        references = [each for attempt in running for of in attempt.inputs.values() for each in of]
        return {(each.job, each.key): "a running job takes it" for each in references}

    def _collection(self, artifact: Artifact) -> str:
        """The folder of the gc that decided to delete an artifact."""
        for name in sorted((name for name in self if name.startswith("gc/")), reverse=True):
            if name.endswith("/deletes.json") and [*artifact] in json.loads(self[name])["artifacts"]:
                return name.removesuffix("/deletes.json")
        self._require(False, f"{artifact} was removed without a decision")
        raise AssertionError

    def _decided(self, artifact: Artifact) -> float:
        """When a gc decided to delete an artifact."""
        return self.since[f"{self._collection(artifact)}/deletes.json"]

    def _is_kept(self, artifact: Artifact) -> bool:
        """Whether a run kept an artifact before the gc that deletes it was closed."""
        gc = self._collection(artifact)
        kept = self.since.get(f"{gc}/keeps/{artifact[0]}-{artifact[1]}.json")
        return kept is not None and kept < self.since[f"{gc}/closed.json"]

    def used(self, until: float) -> dict[Artifact, str]:
        """What the last runs of each recipe had used at a time."""
        newest: dict[str, list[str]] = {}
        for run in sorted(self.runs(), key=position_of):
            newest.setdefault(recipe_of(run), []).append(run)
        last = {run for runs in newest.values() for run in runs[-POLICY.keep_runs :]}
        keys: dict[tuple[str, str], Artifact] = {}  # (run, stage) -> what it used last, as long as it was not over
        for name, since in self.since.items():  # in their order
            if name.startswith("runs/") and "/events/" in name and since < until:
                run, event = name.split("/")[1], json.loads(self[name])
                over = self.since.get(f"runs/{run}/over.json", since)
                if run in last and event.get("key") and since <= over:
                    keys[run, event["stage"]] = (self._job_of(run, event["stage"]), event["key"])
        return self._closure({artifact: f"{run} used it" for (run, _), artifact in keys.items()})

    def _job_of(self, run: str, stage: str) -> str:
        return str(json.loads(self[f"runs/{run}/plan.json"])["pipeline"]["stages"][stage]["job"])

    # ------------------------------------------------------------------------------------------- records

    def runs(self) -> list[str]:
        return [name.split("/")[1] for name in self if name.startswith("runs/") and name.endswith("/plan.json")]

    def runs_under_way(self) -> list[str]:
        return sorted(run for run in self.runs() if f"runs/{run}/over.json" not in self)

    def models(self) -> list[str]:
        """The keys of committed models."""
        return sorted(key for job, key in self.manifests.keys() - self.deleted if job == "pretrain")

    def ticks(self, schedule: str) -> list[Tick]:
        names = sorted(name for name in self if name.startswith(f"schedules/{schedule}/ticks/"))
        return [Tick.model_validate_json(self[name]) for name in names]

    def ends(self, schedule: str) -> dict[int, End]:
        names = [name for name in self if name.startswith(f"schedules/{schedule}/ends/")]
        return {int(name.split("/")[-1][:8]): End.model_validate_json(self[name]) for name in names}

    def aliases(self) -> dict[str, list[Alias]]:
        found: dict[str, dict[int, Alias]] = {}
        for name in self:
            if name.startswith("aliases/"):
                _, alias, number = name.split("/")
                found.setdefault(alias, {})[int(number[:-5])] = Alias.model_validate_json(self[name])
        return {alias: [moves[number] for number in sorted(moves)] for alias, moves in found.items()}

    def schedules(self) -> list[str]:
        return sorted({name.split("/")[1] for name in self if name.startswith("schedules/")})

    def is_pending(self) -> str | None:
        """Say what a server still has to do."""
        if (waiting := [name for name in self if "/notices/" in name]) != []:
            return f"{waiting} are not sent"
        for schedule in self.schedules():
            ends = self.ends(schedule)
            for tick in self.ticks(schedule):
                if tick.decision == "run" and tick.number not in ends:
                    return f"tick {tick.number} has no end"
        under_way = [job for job in self.cluster.jobs.values() if not job.ended and job.is_supervised]
        return f"{under_way[0].submission_id} is under way" if under_way else None

    # ------------------------------------------------------------------------------------------- the end

    def check_end(self, notices: set[str], is_calm: bool) -> None:
        """Check the records.

        Args:
            notices: the ids of those that people received.
            is_calm: no driver died.
        """
        assert not self.faults, self.faults
        for schedule in self.schedules():
            self._check_ticks(schedule)
            died = [end.error for end in self.ends(schedule).values() if "driver" in end.error]
            assert not (is_calm and died), f"nothing died: {died}"
            expected = {f"0123456789abcdef/{schedule}/{each}" for each in self._events(schedule)}
            assert expected <= notices, f"not received: {expected - notices}"
            assert notices <= expected, f"did not happen: {notices - expected}"
        for name, moves in self.aliases().items():
            self._check_moves(name, moves)
        for artifact in self.manifests.keys() - self.deleted:
            made = self.manifests[artifact]
            assert made.content_digest == f"content of {made.key}"
            for references in made.inputs.values():
                for each in references:
                    assert (each.job, each.key) not in self.deleted, f"{artifact} has lost its input {each}"

    def _check_ticks(self, schedule: str) -> None:
        ticks, ends = self.ticks(schedule), self.ends(schedule)
        assert [tick.number for tick in ticks] == [*range(1, len(ticks) + 1)], "the numbers of decisions have gaps"
        decided = Counter(tick.tick for tick in ticks)
        assert not decided or max(decided.values()) == 1, f"{decided.most_common(1)} was decided twice"
        began = {tick.number: tick.run for tick in ticks if tick.decision == "run"}
        assert len(set(began.values())) == len(began), "two ticks have the same run"
        assert ends.keys() == began.keys(), "a run without an end, or an end without a run"
        undecided = {run for run in self.runs() if "-tick" in run} - set(began.values())
        assert not undecided, f"runs of ticks without a decision: {undecided}"
        for number, end in ends.items():
            over = Over.model_validate_json(self[f"runs/{began[number]}/over.json"])
            assert end.status == over.status, f"tick {number}: {end.status}, its run: {over.status}"
            moves = [move for moves in self.aliases().values() for move in moves if move.run == began[number]]
            promoted = end.alias is not None and end.alias.outcome == "promoted"
            assert promoted == bool(moves), f"tick {number}: moves {len(moves)}, told: {end.alias}"
            refused = end.status == "SUCCEEDED" and self._refused(over, began[number])
            assert not refused or end.alias is not None, f"tick {number}: nobody was told that it refused"

    def _refused(self, over: Over, run: str) -> bool:
        """Whether the comparison that a run ended with is its own, and the alias stayed.

        A driver may make one and die; if the alias moves then, the next driver ends with another one.
        """
        made = [self.manifests["promote", stage.key] for stage in over.stages if stage.job == "promote"]
        return any(each.run == run and each.metrics["verdict"] != "promoted" for each in made)

    def _events(self, schedule: str) -> Iterator[str]:
        """Yield what people are to hear of a schedule."""
        for tick in self.ticks(schedule):
            if tick.decision == "nothing_new" and tick.failures:
                yield f"{tick.number}/recovered"
            if tick.decision == "skip" and tick.skips == SKIPS:
                yield f"{tick.number}/skipped"
            if (end := self.ends(schedule).get(tick.number)) is None:
                continue
            if end.failed or (end.status == "SUCCEEDED" and tick.failures):
                yield f"{tick.number}/{'failed' if end.failed else 'recovered'}"
            if end.alias is not None:
                yield f"{tick.number}/{end.alias.outcome}"

    def count(self, transitions: Counter[tuple[str, str, str]], notices: set[str]) -> None:
        """Count what happened, by its kind."""
        for schedule in self.schedules():
            ends = self.ends(schedule)
            for tick in self.ticks(schedule):
                end = ends.get(tick.number)
                transitions["tick", tick.decision, "" if end is None else f"{end.status} {end.error[:14]}".strip()] += 1
        for moves in self.aliases().values():
            transitions.update(("alias", move.why, "to another" if move.target else "to none") for move in moves)
        transitions.update(("notice", each.split("/")[-1], "received") for each in notices)
        for name in self:
            if name.startswith("gc/") and ("/keeps/" in name or name.endswith("/over.json")):
                transitions["gc", "kept" if "/keeps/" in name else "collection", "over"] += 1
        transitions["gc", "artifact", "deleted"] += len(self.deleted)

    def _check_moves(self, name: str, moves: list[Alias]) -> None:
        assert [move.number for move in moves] == [*range(1, len(moves) + 1)], f"@{name}: numbers have gaps"
        reports = Counter(move.report for move in moves if move.report is not None)
        assert not reports or max(reports.values()) == 1, f"@{name}: a comparison moved it twice"
        for before, move in zip([None, *moves], moves, strict=False):
            if move.why != "rule":
                continue
            made = self.manifests["promote", str(move.report)]
            rival = [reference.key for reference in made.inputs.get("against", [])]
            assert made.metrics["verdict"] == "promoted", f"@{name}: a refused candidate became current"
            assert move.target is not None and move.target == made.inputs["candidate"][0]
            named = [] if before is None or before.target is None else [before.target.key]
            assert rival == named, f"@{name}: move {move.number} was compared with {rival}, and replaces {named}"
