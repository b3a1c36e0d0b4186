"""The names and contents of a store's objects.

`Layout` has all names. Records are frozen models, which validate what others wrote into the store.
"""

from __future__ import annotations

import getpass
import socket
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from pipelines.environment import environment
from pipelines.spec import Kind
from vit_model.fields import Frozen

LAYOUT_VERSION = 1
CHECKSUMMED = "shards/"  # each image in these files has its own checksum, compared at every read
KEPT_WEIGHTS = "checkpoints/"  # weights of a pretraining before its last step, which few readers need


class Layout:
    """The names of all objects in a store.

    store.json                                          {id, layout version}, created once
    artifacts/<job>/<key>/manifest.json                 the commit of an artifact
    artifacts/<job>/<key>/replaced.json                 --force, or deleted by gc: {successor key, who, why}
    artifacts/<job>/<key>/listing.json                  the names of the source's files; the key has their contents
    artifacts/<job>/<key>/attempts/<n>/attempt.json     written before the job is submitted: its input, and a nonce
    artifacts/<job>/<key>/attempts/<n>/alive.json       its sign of life, the only object that is ever replaced
    artifacts/<job>/<key>/attempts/<n>/files/...        the files of that attempt
    artifacts/<job>/<key>/attempts/<n>/ledger/...       a fine-tuning's finished trials and refits, for later attempts
    artifacts/<job>/<key>/attempts/<n>/log.txt          its job's log (a cluster's own copy is lost with the cluster)
    artifacts/<job>/<key>/attempts/<n>/start.json       the checkpoint that it starts from, chosen once
    artifacts/<job>/<key>/attempts/<n>/checkpoints/<step>/...   a training's state, and manifest.json, its commit
    artifacts/<job>/<key>/attempts/<n>/checkpoints/<fit>/<step>/...     the same for a running fit of a fine-tuning
    artifacts/<job>/<key>/attempts/<n>/log/...          what a training measures while it runs (`training_log`)
    artifacts/<job>/<key>/attempts/<n>/requests/<m>.json        a request for a checkpoint now
    runs/<run id>/plan.json  stop.json  events/<ulid>.json
    runs/<run id>/over.json                             its end, with the state of all stages, created once
    aliases/<name>/<n>.json                             a move of an alias, numbered: the highest is current
    schedules/<name>/<n>.json                           numbered: the highest is current, the others are history
    schedules/<name>/ticks/<n>.json                     the decision on a tick, written before it is carried out
    schedules/<name>/ends/<n>.json                      how the run of that tick ended
    schedules/<name>/notices/<n>-<event>.json           a notice to send, removed when it was sent
    gc/<n>.json                                         artifacts that nothing needs; deleted after a grace period
    gc/<n>/keeps/<job>-<key>.json                       a run or an alias needs a listed artifact after all
    gc/<n>/closed.json  deletes.json  over.json         keeps come too late; what is deleted; all of it is
    """

    STORE = "store.json"

    @staticmethod
    def artifact(job: str, key: str) -> str:
        return f"artifacts/{job}/{key}"

    @classmethod
    def manifest(cls, job: str, key: str) -> str:
        return f"{cls.artifact(job, key)}/manifest.json"

    @classmethod
    def replaced(cls, job: str, key: str) -> str:
        return f"{cls.artifact(job, key)}/replaced.json"

    @classmethod
    def listing(cls, job: str, key: str) -> str:
        return f"{cls.artifact(job, key)}/listing.json"

    @classmethod
    def attempts(cls, job: str, key: str) -> str:
        return f"{cls.artifact(job, key)}/attempts"

    @classmethod
    def attempt(cls, job: str, key: str, number: int) -> str:
        return f"{cls.attempts(job, key)}/{number}"

    @classmethod
    def files(cls, job: str, key: str, number: int) -> str:
        return f"{cls.attempt(job, key, number)}/files"

    @classmethod
    def heartbeat(cls, job: str, key: str, number: int) -> str:
        return f"{cls.attempt(job, key, number)}/alive.json"

    @classmethod
    def checkpoints(cls, job: str, key: str, number: int, fit: str | None = None) -> str:
        return f"{cls.attempt(job, key, number)}/checkpoints" + (f"/{fit}" if fit else "")

    @classmethod
    def checkpoint(cls, job: str, key: str, number: int, step: int, fit: str | None = None) -> str:
        return f"{cls.checkpoints(job, key, number, fit)}/{step}"

    @classmethod
    def log(cls, job: str, key: str, number: int) -> str:
        return f"{cls.attempt(job, key, number)}/log"

    @classmethod
    def requests(cls, job: str, key: str, number: int) -> str:
        return f"{cls.attempt(job, key, number)}/requests"

    @classmethod
    def ledger(cls, job: str, key: str, number: int) -> str:
        return f"{cls.attempt(job, key, number)}/ledger"

    @staticmethod
    def run(run: str) -> str:
        return f"runs/{run}"

    @staticmethod
    def schedule(name: str) -> str:
        return f"schedules/{name}"

    @classmethod
    def ticks(cls, schedule: str) -> str:
        return f"{cls.schedule(schedule)}/ticks"

    @classmethod
    def ends(cls, schedule: str) -> str:
        return f"{cls.schedule(schedule)}/ends"

    @classmethod
    def notices(cls, schedule: str) -> str:
        return f"{cls.schedule(schedule)}/notices"

    @staticmethod
    def alias(name: str) -> str:
        return f"aliases/{name}"

    @staticmethod
    def gc(number: int) -> str:
        return f"gc/{number}"


def _iso_time(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time needs an offset from UTC")  # without it, times cannot be compared
    return text


Name = Annotated[str, Field(pattern=r"^[\w-]+$")]
"""A part of an object's name, without slashes or dots."""
Time = Annotated[str, AfterValidator(_iso_time)]
"""A time in the format of `now`."""


class FileEntry(Frozen):
    """A file of an artifact; `path` is relative to its attempt."""

    path: str
    size: int
    sha256: str


class InputRef(Frozen):
    """An input of a stage, as it was when the stage began."""

    job: Name
    key: Name
    content_digest: str
    manifest_sha256: str


class Attempt(Frozen):
    """The complete input of a job, written before it is submitted; `--spec` points to it."""

    job: str
    key: str
    number: int
    stage: str
    run: str
    nonce: str
    submission_id: str
    store_id: str
    store_uri: str
    cluster_address: str
    cluster_session: str
    config: dict[str, Any]
    inputs: dict[str, list[InputRef]]
    source: str | None
    code_digest: str
    created: str


class Heartbeat(Frozen):
    """An attempt's sign of life; `beat` increases each time, and `step` is the training's, if the stage has steps."""

    nonce: str
    beat: int = 0
    step: int | None = None
    seconds: float = 0.0
    """How long the attempt has run, and the attempts that it continues."""


class Manifest(Frozen):
    """The commit of an artifact: its files, its inputs, and how and when it was made."""

    layout_version: int = LAYOUT_VERSION
    job: str
    kind: Kind
    key: str
    content_digest: str
    stage: str
    run: str
    attempt: int
    nonce: str
    files: tuple[FileEntry, ...]
    inputs: dict[str, list[InputRef]]
    config: dict[str, Any]
    source: str | None
    metrics: dict[str, float | int | str]
    timing_dependent: bool = False
    code: dict[str, Any]
    environment: dict[str, Any]
    started: Time
    finished: Time
    user: str
    earlier_seconds: float = 0.0
    """How long earlier attempts ran whose trials, parts or checkpoints this one used."""
    own_sha256: str | None = None
    """The sha256 of the manifest's bytes without this value; None in manifests from before it was added."""

    @property
    def folder(self) -> str:
        """The prefix of the files' paths."""
        return Layout.files(self.job, self.key, self.attempt)

    @property
    def seconds(self) -> float:
        """How long the stage took in all attempts that the result is from."""
        last = datetime.fromisoformat(self.finished) - datetime.fromisoformat(self.started)
        return self.earlier_seconds + last.total_seconds()


class Checkpoint(Frozen):
    """The commit of a training's state after `step` steps: one file per worker, below `folder`."""

    job: Name
    key: Name
    attempt: int
    step: int
    files: tuple[FileEntry, ...]
    created: Time
    fit: Name | None = None
    """The fit of a fine-tuning; None for a pretraining."""
    best: int | None = None
    """A pretraining's best step on dev so far, whose checkpoint the result needs; None if dev was not measured."""

    @property
    def folder(self) -> str:
        """The prefix of the files' paths."""
        return Layout.checkpoint(self.job, self.key, self.attempt, self.step, self.fit)


class Start(Frozen):
    """The checkpoint that an attempt starts from; without fields if there was none."""

    attempt: int | None = None
    step: int | None = None


class Replaced(Frozen):
    """The record that `--force` or `gc` writes beside an artifact, with the key that replaces it."""

    successor: Name
    run: str
    who: str
    why: str
    time: str


def _with_stages(pipeline: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(pipeline.get("name"), str):
        raise ValueError("a pipeline needs a name")
    for name, stage in pipeline.get("stages", {}).items():
        if not isinstance(stage.get("job"), str):
            raise ValueError(f"stage {name!r} needs a job")
    return pipeline


class RunPlan(Frozen):
    """The fields of a run's plan.json; later versions may write more, which are ignored."""

    model_config = ConfigDict(extra="ignore")

    run: str
    pipeline: Annotated[dict[str, Any], AfterValidator(_with_stages)]
    targets: list[str]
    stages: list[str]
    digest: str
    force: dict[str, str]
    created: Time
    strict_code: bool = False
    latest: dict[str, InputRef | None] = Field(default_factory=dict)
    """Stage with `init_from: latest`, or @alias -> the model that it named at that time; None if there was none."""
    aliases: dict[str, int] = Field(default_factory=dict)
    """@alias -> the number of its last move at that time."""

    @model_validator(mode="after")
    def _has_its_stages(self) -> Self:
        if unknown := {*self.stages} - {*self.pipeline.get("stages", {})}:
            raise ValueError(f"the pipeline has no stage {min(unknown)!r}")
        return self


class StageState(Frozen):
    """The state of a stage of a run; it may have more fields, from the stage's last event."""

    model_config = ConfigDict(extra="allow")

    stage: str
    job: Name
    status: str
    key: Name | None = None


class StopRequest(Frozen):
    """The content of stop.json."""

    who: str
    time: Time
    why: str = ""
    """Empty, if a person stopped the run, or there was nothing left to do."""


class Over(Frozen):
    """The end of a run: its status, and the state of its stages, in running order."""

    status: str
    time: Time
    detail: str = ""
    stages: tuple[StageState, ...]


class Event(Frozen):
    """The common fields of a run's events; an event may have more."""

    model_config = ConfigDict(extra="allow")

    event: str
    time: Time
    stage: str | None = None
    status: str | None = None
    key: Name | None = None
    submission_id: str | None = None
    cluster_address: str | None = None
    cluster_session: str | None = None
    host: str | None = None
    pid: int | None = None
    process_created: float | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if missing := _NEEDED.get(self.event, set()) - self.model_fields_set:
            raise ValueError(f"event {self.event!r}: missing {', '.join(sorted(missing))}")
        return self


# The fields that an event of each kind must have.
_NEEDED = {
    "stage": {"stage", "status"},
    "attempt ended": {"stage", "status"},
    "driver": {"host", "pid", "process_created"},
    "driver submitted": {"submission_id", "cluster_address", "cluster_session", "store_uri"},
}


def now() -> str:
    """Return the time, UTC, in ISO 8601 with microseconds."""
    return environment().utc().isoformat()


def who() -> str:
    """Return user@host."""
    return f"{getpass.getuser()}@{socket.gethostname()}"
