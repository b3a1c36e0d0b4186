"""The driver: walks the DAG, submits each ready stage as a Ray job, follows it, and keeps no state of its own.

Everything that must survive is in the store before it is acted on: kill the driver anywhere, give the same command,
and it goes on from what it finds. The rules: an attempt is written before it is
submitted; Ray takes a submission id once; a job that the same cluster does not know is submitted again under the same
id; a job of a cluster that is gone is LOST and followed by the next attempt; a manifest beats every status.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pipelines import identity
from pipelines.cluster.jobs_client import ENDED, Cluster, ClusterUnreachable, python_entrypoint
from pipelines.engine import plan
from pipelines.engine.plan import PlannedStage
from pipelines.engine.runs import Run
from pipelines.spec import RecipeError, module
from pipelines.store import (
    UNREACHABLE_SECONDS,
    Attempt,
    InputRef,
    Layout,
    Manifest,
    Store,
    StoreDamaged,
    StoreUnreachable,
    add_event,
    create_attempt,
    input_ref,
    last_attempt,
    now,
    read_manifest,
    stop_wished,
    wait_for_store,
    wish_stop,
)

ATTEMPTS = 3  # a command makes at most this many attempts at a stage
BACKOFF_SECONDS = 1.0  # before the second attempt; doubles
POLL_SECONDS = 0.1  # between the driver's steps
ASK_SECONDS = 0.5  # between questions to the store and to the cluster, whom answering costs time
LAST_WORDS_SECONDS = 5.0  # a job may take to end after its commit
MANIFEST_SECONDS = 60.0  # a job that SUCCEEDED shows its manifest within this time
USER_MISTAKE = 2  # the exit code of a stage that is never retried


class Display(Protocol):
    """Who is told what happens."""

    def stage(self, name: str, status: str, detail: str = "") -> None:
        """A stage changed its status."""

    def line(self, name: str, text: str) -> None:
        """A stage's job printed a line."""

    def say(self, text: str) -> None:
        """Something else that a person should know."""


class Connection(Protocol):
    """How the driver reaches a cluster; what it does when the cluster is gone is the connection's business."""

    def cluster(self) -> Cluster:
        """The cluster, started or found again where that is needed."""

    def keep(self) -> None:
        """Called at every poll."""


@dataclass
class Following:
    """A stage under way, as this driver knows it."""

    planned: PlannedStage
    attempt: Attempt | None = None
    attempts_made: int = 0
    wait_until: float = 0.0
    succeeded_at: float | None = None
    running: bool = False
    seen: bool = False  # this driver submitted it or saw it live: how it ends is an answer to this command
    waiting: bool = False
    log: threading.Thread | None = None
    log_end: threading.Event = field(default_factory=threading.Event)


def run_pipeline(
    store: Store, run: Run, connection: Connection, display: Display, parallel: int
) -> tuple[dict[str, str], list[PlannedStage]]:
    """Drive a run to its end, with at most `parallel` stages under way at once.

    Returns:
        stage -> CACHED, SUCCEEDED, FAILED, STOPPED or SKIPPED, and the committed stages in running order, with their
        manifests.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the run's jobs were stopped.
    """
    driver = Driver(store, run, connection, display, parallel)
    try:
        while wait_for_store(driver.step, display.say):
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        wait_for_store(driver.stop, display.say)
        raise
    finally:
        driver.end_logs()
    outcome = (
        "SUCCEEDED"
        if set(driver.status.values()) <= {"CACHED", "SUCCEEDED"}
        else ("STOPPED" if "STOPPED" in driver.status.values() else "FAILED")
    )
    wait_for_store(lambda: add_event(store, run.id, "finished", status=outcome), display.say)
    return driver.status, [driver.committed[name] for name in driver.names if name in driver.committed]


class Driver:
    """One process's walk over one run."""

    def __init__(
        self, store: Store, run: Run, connection: Connection, display: Display, parallel: int
    ) -> None:
        self.store, self.run, self.connection, self.display = store, run, connection, display
        self.parallel = parallel
        self.names = run.pipeline.needed_for(run.targets)
        self.committed: dict[str, PlannedStage] = {}
        self.references: dict[str, InputRef] = {}
        self.status: dict[str, str] = {}
        self.following: dict[str, Following] = {}
        self.next_look_for_stop = 0.0

    def step(self) -> bool:
        """Look at every stage once; False when all have ended."""
        self.connection.keep()
        if time.monotonic() >= self.next_look_for_stop:
            self.next_look_for_stop = time.monotonic() + ASK_SECONDS
            if stop_wished(self.store, self.run.id):
                self.stop()
                return False
        for name in self.names:
            if name not in self.status and name not in self.following and len(self.following) < self.parallel:
                self._begin(name)
        for name, following in list(self.following.items()):
            try:
                self._follow(name, following)
            except (ClusterUnreachable, StoreUnreachable) as error:
                if not following.waiting:
                    self.display.stage(name, "WAITING", f"no answer: {error}")
                following.waiting = True
                following.wait_until = time.monotonic() + UNREACHABLE_SECONDS
            except StoreDamaged as error:  # the stage's manifest or attempt
                self._save_log(following)
                self._end(name, "FAILED", str(error))
        return len(self.status) < len(self.names)

    def stop(self) -> None:
        """The wish first, so that no other driver goes on; then the jobs that this run has submitted."""
        wish_stop(self.store, self.run.id)
        own = [following for following in self.following.values() if self._is_own(following.attempt)]
        for following in own:
            assert following.attempt is not None
            self._stop_job(following.attempt)
        for following in own:
            self._wait_for_end(following)
            self._save_log(following)
        for name in self.names:
            if name not in self.status:
                self._end(name, "STOPPED", "stopped")

    def _is_own(self, attempt: Attempt | None) -> bool:
        """A job that another run submitted is that run's to stop."""
        return attempt is not None and attempt.run == self.run.id

    def end_logs(self) -> None:
        """Let no thread outlive the walk."""
        for following in self.following.values():
            following.log_end.set()

    # ------------------------------------------------------------------------------------------ beginning

    def _begin(self, name: str) -> None:
        asked = self.run.pipeline.stages[name]
        inputs = [given for inputs in asked.inputs().values() for given in inputs]
        lost = [given for given in inputs if self.status.get(given) in {"FAILED", "SKIPPED", "STOPPED"}]
        config = plan.without(asked, lost)
        if config is None:
            self._end(name, "SKIPPED", f"{lost[0]} was not made")
        elif all(given in self.committed or given in lost for given in inputs):
            try:
                planned = plan.plan_stage(self.store, name, config, self.references, self.run.strict_code)
                if name in self.run.force:
                    key = plan.force_stage(self.store, planned, self.run.force[name], self.run.id)
                    manifest = read_manifest(self.store, config.job, key)
                    planned = replace(planned, key=key, manifest=manifest, damaged=None)
            except (RecipeError, StoreDamaged) as error:  # files that are gone since the run was planned
                self._end(name, "FAILED", str(error))
                return
            if planned.damaged is not None:
                self._end(name, "FAILED", planned.damaged)
            elif planned.manifest is not None:
                self._commit(planned, planned.manifest, "CACHED")
            elif not stop_wished(self.store, self.run.id):  # the next look sees it too
                self.following[name] = Following(planned)

    def _commit(self, planned: PlannedStage, manifest: Manifest, status: str) -> None:
        self.references[planned.name] = input_ref(self.store, manifest)
        self.committed[planned.name] = replace(planned, manifest=manifest)
        self._end(planned.name, status, manifest.key[:12], key=manifest.key)

    def _end(self, name: str, status: str, detail: str, **fields: Any) -> None:
        add_event(self.store, self.run.id, "stage", stage=name, status=status, detail=detail, **fields)
        self.status[name] = status
        if (following := self.following.pop(name, None)) is not None:
            self._log_ended(following)
        self.display.stage(name, status, detail)

    # ------------------------------------------------------------------------------------------ following

    def _follow(self, name: str, following: Following) -> None:
        config, key = following.planned.config, following.planned.key
        assert key is not None
        if time.monotonic() < following.wait_until:
            return
        following.wait_until = time.monotonic() + ASK_SECONDS
        if (manifest := read_manifest(self.store, config.job, key)) is not None:
            self._wait_for_end(following)  # its last lines belong to its log
            self._save_log(following)
            self._commit(following.planned, manifest, "SUCCEEDED")
            return
        cluster = self.connection.cluster()
        if following.attempt is None:
            following.attempt = last_attempt(self.store, config.job, key) or self._next_attempt(
                following, cluster
            )
        attempt = following.attempt
        job = cluster.job(attempt.submission_id)
        if job is None and attempt.cluster_session == cluster.session_name:
            following.seen = True
            self._submit(cluster, attempt)
        elif job is None:
            self._retry(name, following, "LOST", "its cluster is gone")
        elif job.status in {"PENDING", "RUNNING"}:
            self._watch(name, following, cluster, job.status)
        elif job.status == "SUCCEEDED":
            following.succeeded_at = following.succeeded_at or time.monotonic()
            if time.monotonic() - following.succeeded_at > MANIFEST_SECONDS:
                self._retry(name, following, "FAILED", "it ended well without a manifest")
        elif (
            read_manifest(self.store, config.job, key) is None
        ):  # looked for first: it may have come just now
            self._job_failed(name, following, job.status, job.driver_exit_code, job.message)

    def _job_failed(
        self, name: str, following: Following, status: str, code: int | None, message: str
    ) -> None:
        if status == "FAILED" and code == USER_MISTAKE and following.seen:
            self._save_log(following)
            self._end(name, "FAILED", self._error_line(following) or "bad input")
        else:
            said = self._error_line(following) or message or f"exit code {code}"
            self._retry(name, following, status, said if status == "FAILED" else "stopped from outside")

    def _retry(self, name: str, following: Following, status: str, detail: str) -> None:
        """The next attempt, unless this command has made its share of them."""
        self._save_log(following)
        self._log_ended(following)
        add_event(self.store, self.run.id, "attempt ended", stage=name, status=status, detail=detail)
        if stop_wished(self.store, self.run.id):
            self._end(name, "STOPPED", "stopped")
        elif following.attempts_made >= ATTEMPTS:
            self._end(name, "FAILED", detail)
        else:
            if following.attempts_made:
                self.display.stage(name, status, f"{detail}; another attempt")
                following.wait_until = time.monotonic() + BACKOFF_SECONDS * 2 ** (following.attempts_made - 1)
            following.attempt = self._next_attempt(following, self.connection.cluster())

    def _next_attempt(self, following: Following, cluster: Cluster) -> Attempt:
        planned, before = following.planned, following.attempt
        assert planned.key is not None and planned.inputs is not None
        number = 1 if before is None else before.number + 1
        wanted = Attempt(
            job=planned.config.job,
            key=planned.key,
            number=number,
            stage=planned.name,
            run=self.run.id,
            nonce=secrets.token_hex(16),
            store_id=self.store.id,
            store_uri=self.store.uri,
            submission_id=f"{planned.config.job}-{planned.key[:12]}-{self.store.id[:8]}-{number}",
            cluster_address=cluster.address,
            cluster_session=cluster.session_name,
            config=planned.config.model_dump(mode="json"),
            inputs=planned.inputs,
            source=planned.source,
            code_digest=identity.code_digest(planned.config.job),
            created=now(),
        )
        attempt = create_attempt(self.store, wanted)
        following.attempts_made += 1
        following.succeeded_at, following.running, following.seen = None, False, False
        return attempt

    def _submit(self, cluster: Cluster, attempt: Attempt) -> None:
        spec = f"{self.store.uri}/{Layout.attempt(attempt.job, attempt.key, attempt.number)}/attempt.json"
        command = python_entrypoint("-m", f"ray_jobs.{module(attempt.job)}", "--spec", spec)
        # written before: whoever stops the run must find the job
        add_event(
            self.store,
            self.run.id,
            "stage",
            stage=attempt.stage,
            status="PENDING",
            attempt=attempt.number,
            key=attempt.key,
            submission_id=attempt.submission_id,
        )
        cluster.submit(
            attempt.submission_id,
            command,
            self.store.settings,
            {"stage": attempt.stage, "run": attempt.run},
        )

    def _watch(self, name: str, following: Following, cluster: Cluster, status: str) -> None:
        attempt = following.attempt
        assert attempt is not None
        following.seen, following.waiting = True, False
        if status == "RUNNING" and not following.running:
            following.running = True
            add_event(
                self.store,
                self.run.id,
                "stage",
                stage=name,
                status="RUNNING",
                attempt=attempt.number,
                key=attempt.key,
                submission_id=attempt.submission_id,
            )
            self.display.stage(name, "RUNNING", f"attempt {attempt.number}" if attempt.number > 1 else "")
        if following.log is None and status == "RUNNING":
            following.log_end = threading.Event()
            following.log = threading.Thread(
                target=cluster.follow_logs,
                daemon=True,
                args=(attempt.submission_id, lambda text: self.display.line(name, text), following.log_end),
            )
            following.log.start()

    # ------------------------------------------------------------------------------------------ logs

    def _save_log(self, following: Following) -> None:
        """Copy a job's log into its attempt; the cluster's own dies with it."""
        attempt = following.attempt
        if attempt is None:
            return
        try:
            log = self.connection.cluster().logs(attempt.submission_id)
        except ClusterUnreachable as error:
            log = f"(the log was lost with its cluster: {error})\n"
        if log:
            self.store.create(
                f"{Layout.attempt(attempt.job, attempt.key, attempt.number)}/log.txt", log.encode()
            )

    def _wait_for_end(self, following: Following) -> None:
        """Let a job that has committed, or was told to stop, finish its last words; not for long."""
        attempt, deadline = following.attempt, time.monotonic() + LAST_WORDS_SECONDS
        if attempt is None:
            return
        try:
            while time.monotonic() < deadline:
                job = self.connection.cluster().job(attempt.submission_id)
                if job is None or job.status in ENDED:
                    return
                time.sleep(POLL_SECONDS)
        except ClusterUnreachable:
            return  # then there is nothing to wait for

    def _log_ended(self, following: Following) -> None:
        if following.log is not None:
            following.log_end.set()  # it then fetches what is still missing
            following.log.join(timeout=5.0)
            following.log = None

    def _error_line(self, following: Following) -> str | None:
        """What the stage said it died of."""
        attempt = following.attempt
        assert attempt is not None
        lines = [
            line
            for line in self.connection.cluster().logs(attempt.submission_id).splitlines()
            if line.strip()
        ]
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return said[-1] if said else lines[-1] if lines else None

    def _stop_job(self, attempt: Attempt) -> None:
        try:
            self.connection.cluster().stop(attempt.submission_id)
        except ClusterUnreachable as error:
            self.display.say(f"could not stop {attempt.submission_id}: {error}")
