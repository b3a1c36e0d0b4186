"""The driver: walks the DAG, submits each ready stage as a Ray job, follows it, and keeps no state of its own.

Everything that must survive is in the store before the driver acts on it, so you can kill the driver at any moment and
give the same command to continue. The rules: an attempt is written before its job is submitted; Ray accepts a
submission id once; a job that the same cluster does not know is submitted again under the same id; a job whose cluster
is gone, or that shows no sign of life, is LOST, and the next attempt follows; a manifest overrides every status.
`pipelines.engine.decisions` has these rules; this module observes the store and the cluster, and carries out the
decisions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event, Thread
from typing import Any

from pipelines import identity
from pipelines.cluster.jobs_client import ClusterUnreachable, python_entrypoint
from pipelines.engine import plan, promotion
from pipelines.engine.decisions import (
    READ_SECONDS,
    Do,
    End,
    EndAttempt,
    InFlight,
    Observation,
    Show,
    decide,
    no_answer,
)
from pipelines.engine.display import RunDisplay
from pipelines.engine.history import end_run
from pipelines.engine.plan import PlannedStage
from pipelines.engine.runs import Run
from pipelines.engine.status import Status, run_outcome
from pipelines.engine.submission import Connection
from pipelines.environment import environment
from pipelines.spec import WEIGHTS, AnyStage, Promote, RecipeError, module
from pipelines.store import (
    LARGEST_RECORD,
    AliasMoved,
    Attempt,
    InputRef,
    Keeper,
    Layout,
    Manifest,
    Store,
    StoreDamaged,
    StoreUnreachable,
    add_event,
    create_attempt,
    input_ref,
    is_at,
    last_attempt,
    now,
    promotion_of,
    promotion_sentence,
    read_manifest,
    remove_progress,
    request_stop,
    retire,
    stop_requested,
    wait_for_store,
)

POLL_SECONDS = 0.1  # between the driver's steps
STOP_SECONDS = 2.0  # between looks for a request to stop
LOG_SECONDS = 5.0  # that a job may take to end after its commit, before its log is saved


@dataclass
class Driver:
    """One process's walk over one run, with at most `parallel` stages in flight."""

    store: Store
    run: Run
    connection: Connection
    display: RunDisplay
    parallel: int
    planned: dict[str, PlannedStage] = field(default_factory=dict)  # stages that have begun
    flights: dict[str, InFlight] = field(default_factory=dict)  # stages that have not ended
    attempts: dict[str, Attempt] = field(default_factory=dict)  # their newest attempts, as the store has them
    status: dict[str, Status] = field(default_factory=dict)  # stages that have ended
    references: dict[str, InputRef] = field(default_factory=dict)  # committed stages
    rivals: dict[str, promotion.Rival] = field(default_factory=dict)  # what promotions are planned with
    anew: set[str] = field(default_factory=set)  # promotions that were planned anew, because their alias had moved
    logs: dict[str, tuple[Thread, Event]] = field(default_factory=dict)
    made_again: set[str] = field(default_factory=set)  # stages whose results were removed during this walk
    look_for_stop_at: float = 0.0

    def __post_init__(self) -> None:
        self.keeper = Keeper(self.store, self.run.id)
        self.names = self.run.pipeline.needed_for(self.run.targets)
        paths = self.run.pipeline.longest_paths()
        # begin the ready stage with the longest path first, because a run takes as long as its longest path
        self.begin_order = sorted(self.names, key=lambda name: -paths[name])

    def walk(self) -> tuple[dict[str, Status], list[PlannedStage]]:
        """Drive the run to its end.

        Returns:
            stage -> CACHED, SUCCEEDED, FAILED, STOPPED or SKIPPED, and the committed stages in running order, with
            their manifests.

        Raises:
            KeyboardInterrupt: Ctrl-C, after the run's jobs were stopped.
        """
        try:
            while self._patiently(self.step):
                environment().sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            if running := [name for name in self.flights if name in self.attempts]:
                self.display.say(f"stopping {', '.join(running)}")
            self._patiently(self.stop)
            raise
        finally:
            for _, end in self.logs.values():  # end the threads with the walk
                end.set()
        outcome = run_outcome(self.status.values())
        self._patiently(lambda: end_run(self.store, self.run.id, outcome))
        return self.status, [self.planned[name] for name in self.names if self.status[name].succeeded]

    def _patiently(self, operation: Callable[[], Any]) -> Any:
        return wait_for_store(operation, self.display.say)

    def step(self) -> bool:
        """Observe every stage once and act; return False when all have ended."""
        self.connection.keep()
        if environment().monotonic() >= self.look_for_stop_at:
            self.look_for_stop_at = environment().monotonic() + STOP_SECONDS
            if stop_requested(self.store, self.run.id):
                self.stop()
                return False
        for name in self.begin_order:
            if name not in self.status and name not in self.flights and len(self.flights) < self.parallel:
                self._begin(name)
        for name in list(self.flights):
            while name in self.flights and self.flights[name].look_at <= environment().monotonic():
                self._follow(name)
        return len(self.status) < len(self.names)

    def stop(self) -> None:
        """Stop the run: first record the request, so that other drivers stop too, then stop the jobs of this run."""
        request_stop(self.store, self.run.id)
        for name in [*self.flights]:
            self._commit_if_made(name)
        attempts = [self.attempts[name] for name in self.flights if name in self.attempts]
        # do not stop a job that another run submitted, or this run in a store that this one is a copy of
        own = [each for each in attempts if each.run == self.run.id and is_at(self.store, each.store_uri)]
        for attempt in own:
            try:
                self.connection.cluster().stop(attempt.submission_id)
            except ClusterUnreachable as error:
                self.display.say(f"could not stop {attempt.submission_id}: {error}")
        for attempt in own:
            self._save_log(attempt)
        for name in self.names:
            if name not in self.status:
                self._end(name, Status.STOPPED, "stopped")

    # ------------------------------------------------------------------------------------------ beginning

    def _begin(self, name: str) -> None:
        """Begin a stage if its inputs have ended."""
        stage = self.run.pipeline.stages[name]
        inputs = [source for sources in stage.inputs().values() for source in sources]
        lost = [source for source in inputs if source in self.status and not self.status[source].succeeded]
        config = plan.without(stage, lost)
        if config is None:
            self._end(name, Status.SKIPPED, f"{lost[0]} was not made")
        elif all(source in self.status for source in inputs):
            self._plan_and_begin(name, config)

    def _plan_and_begin(self, name: str, config: AnyStage) -> None:
        """Plan a stage, and end it if there is nothing to run."""
        try:
            planned = self._plan(name, config)
        except (RecipeError, StoreDamaged) as error:  # files that were removed after the run was planned
            self._end(name, Status.FAILED, str(error))
            return
        self.planned[name] = planned
        self.attempts.pop(name, None)
        if planned.damaged is not None:
            self._end(name, Status.FAILED, planned.damaged)
        elif planned.manifest is not None:
            self._commit(name, planned.manifest, Status.CACHED)
        else:
            self.flights[name] = InFlight()

    def _plan_anew(self, name: str) -> None:
        """Plan a stage anew because its source or an input is gone; make inputs again first, once in a walk."""
        config = self.planned[name].config
        inputs = {source for sources in config.inputs().values() for source in sources}
        refs = {source: self.references[source] for source in inputs}
        gone = {source for source, ref in refs.items() if read_manifest(self.store, ref.job, ref.key) is None}
        if again := gone & self.made_again:
            self._end(name, Status.FAILED, f"the result of {min(again)} was removed again")
        elif gone:
            self.made_again |= gone
            for source in gone:
                del self.status[source], self.references[source]
            del self.flights[name]
        else:
            self._plan_and_begin(name, config)

    def _plan(self, name: str, config: AnyStage) -> PlannedStage:
        self.keeper.look()
        newest = self.run.latest
        if isinstance(config, Promote):
            if name not in self.rivals:
                self.rivals[name] = promotion.rival_of(self.store, self.run, name, config)
            newest = self.rivals[name].newest
        planned = plan.plan_stage(self.store, name, config, self.references, self.run.strict_code, newest=newest)
        key = planned.key
        assert key is not None and planned.inputs is not None
        if name in self.run.force:
            key = plan.force_stage(self.store, planned, self.run.force[name], self.run.id)
        for reference in (each for references in planned.inputs.values() for each in references):
            self.keeper.keep(reference.job, reference.key)
        if not self.keeper.keep(config.job, key):
            key = retire(self.store, config.job, key, self.run.id)
        if key == planned.key:
            return planned
        return replace(planned, key=key, manifest=read_manifest(self.store, config.job, key), damaged=None)

    def _commit(self, name: str, manifest: Manifest, status: Status) -> None:
        if manifest.kind in WEIGHTS and manifest.run == self.run.id:
            # Its process may have died before it did this.
            remove_progress(self.store, manifest.job, manifest.key)
        config = self.planned[name].config
        if isinstance(config, Promote):
            self._settle(name, config, manifest, status)
        else:
            self._end_with(name, manifest, status, manifest.key[:12])

    def _end_with(self, name: str, manifest: Manifest, status: Status, detail: str, **fields: Any) -> None:
        self.references[name] = input_ref(self.store, manifest)
        self.planned[name] = replace(self.planned[name], manifest=manifest)
        self._end(name, status, detail, key=manifest.key, **fields)

    def _settle(self, name: str, config: Promote, manifest: Manifest, status: Status) -> None:
        """Move the alias of a promotion, if its comparison says so; compare once more if somebody else moved it."""
        decided = promotion_of(manifest)
        assert decided is not None
        try:
            move = promotion.settle(self.store, self.run, config, manifest, self.rivals[name].number)
        except AliasMoved as error:
            if name in self.anew:
                self._end(name, Status.FAILED, str(error))
                return
            self.rivals[name] = promotion.rival_now(self.store, config, self.run.latest)
            self.anew.add(name)
            self.display.stage(name, Status.PENDING, f"{config.against} has moved; comparing with its new model")
            self._end_log(name)
            # planned in the next step: a request that gets lost here must not leave the old comparison in flight
            self.flights.pop(name, None)
            return
        detail = promotion_sentence(decided)
        if move is not None and move.run != self.run.id:
            detail += f" (moved by {move.run}; {config.against} does not move again)"
        self._end_with(name, manifest, status, detail, promotion=decided | {"by": manifest.run})

    def _commit_if_made(self, name: str) -> None:
        """End a stage whose job has committed since the store was last read."""
        job_type, key = self.planned[name].config.job, self.planned[name].key
        assert key is not None
        with suppress(StoreDamaged):  # then it is not made
            if (manifest := read_manifest(self.store, job_type, key)) is not None:
                self._commit(name, manifest, Status.SUCCEEDED)

    def _end(self, name: str, status: Status, detail: str, **fields: Any) -> None:
        self._add_event(name, status, detail=detail, **fields)
        self.status[name] = status
        if status == Status.STOPPED:
            self.look_for_stop_at = 0.0  # before a stage is skipped for want of this one
        self.flights.pop(name, None)
        self._end_log(name)
        self.display.stage(name, status, detail)

    # ------------------------------------------------------------------------------------------ following

    def _follow(self, name: str) -> None:
        """Observe a stage once and carry out the decision; then adopt the stage's new state."""
        flight = self.flights[name]
        try:
            observed = self._observe(name)
            next_flight, actions = decide(self.flights[name], observed, environment().monotonic())
            for action in actions:
                self._act(name, observed, action)
        except (ClusterUnreachable, StoreUnreachable) as error:
            next_flight, actions = no_answer(flight, str(error), environment().monotonic())
            for action in actions:
                self._act(name, Observation(), action)
        except StoreDamaged as error:  # the stage's manifest or attempt
            next_flight = flight
            self._act(name, Observation(), End(Status.FAILED, str(error)))
        if name in self.flights:
            self.flights[name] = next_flight

    def _observe(self, name: str) -> Observation:
        flight, job_type, key = self.flights[name], self.planned[name].config.job, self.planned[name].key
        assert key is not None
        is_due = name not in self.attempts or flight.read_at <= environment().monotonic()
        if is_due and (manifest := read_manifest(self.store, job_type, key)) is not None:
            return Observation(manifest=manifest)
        cluster = self.connection.cluster()
        attempt = self.attempts.get(name) or last_attempt(self.store, job_type, key)
        if attempt is None:
            return Observation(stop_requested=stop_requested(self.store, self.run.id))
        self.attempts[name] = attempt
        if not is_at(self.store, attempt.store_uri):
            wished = stop_requested(self.store, self.run.id)
            return Observation(attempt, stop_requested=wished, lost=f"its store is {attempt.store_uri}")
        job = cluster.job(attempt.submission_id)
        if job is not None and not job.ended:
            if not is_due:
                return Observation(attempt, job, heartbeat=flight.sign and flight.sign[1], is_new=False)
            heartbeat = self.store.read(Layout.heartbeat(job_type, key, attempt.number), LARGEST_RECORD)
            self.flights[name] = replace(flight, read_at=environment().monotonic() + READ_SECONDS)
            return Observation(attempt, job, heartbeat=heartbeat)
        log = "" if job is None else cluster.logs(attempt.submission_id)
        session = cluster.session_name
        wished = stop_requested(self.store, self.run.id)
        # read the manifest again: it may have been written before the job ended
        return Observation(attempt, job, session, log, wished, read_manifest(self.store, job_type, key))

    def _act(self, name: str, observed: Observation, action: Do | Show) -> None:
        if action is Do.COMMIT or isinstance(action, EndAttempt | End):
            self._save_log(self.attempts.get(name))
        match action:
            case Do.WRITE:
                self.attempts[name] = self._write_attempt(self.planned[name], self.attempts.get(name))
            case Do.SUBMIT:
                self._submit(name, self.attempts[name])
            case Do.ANNOUNCE:
                self._announce(name, self.attempts[name])
            case Do.STOP:
                with suppress(ClusterUnreachable):  # its process looks for a successor anyway
                    self.connection.cluster().stop(self.attempts[name].submission_id)
            case Do.PLAN:
                self._plan_anew(name)
            case Do.COMMIT:
                assert observed.manifest is not None
                self._commit(name, observed.manifest, Status.SUCCEEDED)
            case EndAttempt(status, detail):
                self._end_log(name)
                assert observed.attempt is not None
                self._add_event(name, status, "attempt ended", detail=detail, attempt=observed.attempt.number)
            case End(status, detail):
                self._end(name, status, detail)
            case Show(status, detail):
                self.display.stage(name, status, detail)

    def _write_attempt(self, planned: PlannedStage, previous: Attempt | None) -> Attempt:
        assert planned.key is not None and planned.inputs is not None
        cluster, number = self.connection.cluster(), 1 if previous is None else previous.number + 1
        nonce = environment().token_hex(16)  # also in the job's id: a copy of this store may use the same Ray
        wanted = Attempt(
            job=planned.config.job,
            key=planned.key,
            number=number,
            stage=planned.name,
            run=self.run.id,
            nonce=nonce,
            store_id=self.store.id,
            store_uri=self.store.uri,
            submission_id=f"{planned.config.job}-{planned.key[:12]}-{nonce[:8]}-{number}",
            cluster_address=cluster.address,
            cluster_session=cluster.session_name,
            config=planned.config.model_dump(mode="json"),
            inputs=planned.inputs,
            source=planned.source,
            code_digest=identity.code_digest(planned.config.job),
            created=now(),
        )
        if planned.files and number == 1:
            listing = json.dumps(sorted(planned.files)).encode()
            self.store.create(Layout.listing(wanted.job, wanted.key), listing)
        return create_attempt(self.store, wanted)

    def _submit(self, name: str, attempt: Attempt) -> None:
        spec = f"{self.store.uri}/{_folder(attempt)}/attempt.json"
        command = python_entrypoint("-m", f"ray_jobs.{module(attempt.job)}", "--spec", spec)
        self._add_job_event(name, Status.PENDING, attempt)  # before it exists, so that `stop` finds it
        metadata = {"stage": attempt.stage, "run": attempt.run}
        self.connection.cluster().submit(attempt.submission_id, command, self.store.settings, metadata)

    def _announce(self, name: str, attempt: Attempt) -> None:
        self._add_job_event(name, Status.RUNNING, attempt)
        self.display.stage(name, Status.RUNNING, f"attempt {attempt.number}" if attempt.number > 1 else "")
        if name not in self.logs:
            end, follow = environment().flag(), self.connection.cluster().follow_logs
            lines = partial(follow, attempt.submission_id, partial(self.display.line, name), end)
            self.logs[name] = environment().start(lines, f"log of {name}"), end

    def _add_job_event(self, name: str, status: Status, job: Attempt) -> None:
        self._add_event(name, status, attempt=job.number, key=job.key, submission_id=job.submission_id)

    def _add_event(self, name: str, status: Status, event: str = "stage", **fields: Any) -> None:
        add_event(self.store, self.run.id, event, stage=name, status=status, **fields)

    # ------------------------------------------------------------------------------------------ logs

    def _save_log(self, attempt: Attempt | None) -> None:
        """Copy a job's log into its attempt, because the cluster's copy is lost with the cluster.

        A job that has committed, or was requested to stop, may first write the end of its log. If the cluster does not
        answer, nothing is copied: `vitflow logs` asks the cluster while there is no copy.
        """
        if attempt is None or not is_at(self.store, attempt.store_uri):
            return
        submission_id, deadline = attempt.submission_id, environment().monotonic() + LOG_SECONDS
        with suppress(ClusterUnreachable):
            while (job := self.connection.cluster().job(submission_id)) is not None and not job.ended:
                if environment().monotonic() >= deadline:
                    break
                environment().sleep(POLL_SECONDS)
            if log := self.connection.cluster().logs(submission_id):
                self.store.create(f"{_folder(attempt)}/log.txt", log.encode())

    def _end_log(self, name: str) -> None:
        if name in self.logs:
            thread, end = self.logs.pop(name)
            end.set()  # the thread then fetches the rest of the log
            thread.join(timeout=5.0)


def _folder(attempt: Attempt) -> str:
    return Layout.attempt(attempt.job, attempt.key, attempt.number)
