"""What every stage's process does around its own work: read the attempt, check, join Ray, run, commit.

    python -m ray_jobs.<module> --spec STORE/artifacts/<job>/<key>/attempts/<n>/attempt.json

A job's module has `main(context) -> Result`, which reads from top to bottom: open the inputs, compute in Ray tasks or
actors, write into `context.staging()`; and ends with `run_stage` of its own name, `pipelines.spec.module` of the job.
Exit codes: 0 committed, 2 the user's mistake (never retried), 1 anything else.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import TypeAdapter

from pipelines import identity
from pipelines.spec import AnyStage, Stage
from pipelines.store import (
    Attempt,
    FileEntry,
    Layout,
    Manifest,
    Staging,
    Store,
    StoreError,
    StoreUnreachable,
    commit,
    local_files,
    now,
    open_store,
    read_manifest,
    who,
)
from vit_model.errors import UserError

if TYPE_CHECKING:
    from ray_jobs.data.shards import Dataset

MODEL_FILES = ("model.safetensors", "config.json")
PACKAGES = ("torch", "ray", "deepspeed", "pyarrow", "numpy", "pillow", "scikit-learn", "matplotlib")


Spec = TypeVar("Spec", bound=AnyStage, covariant=True)


@dataclass(frozen=True)
class Context(Generic[Spec]):
    """What a stage works on. It travels to Ray tasks; each opens the store for itself."""

    attempt: Attempt
    config: Spec
    inputs: dict[str, tuple[Manifest, ...]]

    def open_store(self) -> Store:
        """The store, opened and checked to be the one that the driver writes to.

        Raises:
            StoreError: this machine sees another store under that address.
        """
        store = open_store(self.attempt.store_uri, create=False)
        if store.id != self.attempt.store_id:
            raise StoreError(
                f"{store.uri} has id {store.id} here, but {self.attempt.store_id} where the driver runs: "
                "is it a folder that all machines share?"
            )
        return store

    def input(self, name: str) -> Path:
        """The folder of the one artifact that the field `name` takes."""
        (manifest,) = self.inputs[name]
        return local_files(self.open_store(), manifest)

    def dataset(self, cache_gib: float | None = None) -> Dataset:
        """The dataset that the field `data` takes. Images on S3 are read as they are needed, through a cache of so many
        GiB (None: the usual size) on this machine."""
        from ray_jobs.data.shards import CACHE_BYTES, open_artifact

        (manifest,) = self.inputs["data"]
        return open_artifact(
            self.open_store(), manifest, int(cache_gib * 2**30) if cache_gib else CACHE_BYTES
        )

    def check_source(self, when: str) -> None:
        """Raise UserError when the files that the stage reads are not those that the run was planned with."""
        if identity.source_fingerprint(self.config) != self.attempt.source:
            raise UserError(
                f"the source changed {when}, since the run was planned: run again when it is at rest"
            )

    @contextmanager
    def staging(self) -> Iterator[Staging]:
        """A local folder to write files into, see `Store.staging`."""
        with self.open_store().staging(
            Layout.files(self.attempt.job, self.attempt.key, self.attempt.number)
        ) as staging:
            yield staging


@dataclass(frozen=True)
class Result:
    """What a stage made."""

    content_digest: str
    files: tuple[FileEntry, ...]
    metrics: dict[str, float | int | str] = field(default_factory=dict)
    timing_dependent: bool = False


def model_digest(files: tuple[FileEntry, ...]) -> str:
    """Identity of a model artifact: its weights and its contract."""
    return identity.sha256(
        identity.canonical_json({entry.path: entry.sha256 for entry in files if entry.path in MODEL_FILES})
    )


def run_stage(module: str) -> None:
    """The whole life of a stage's process; ends it. `module` has a `main`."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--spec", required=True, help="the attempt.json of the attempt to run")
    spec: str = arguments.parse_args().spec
    # imported by its name: what is sent to workers must not belong to __main__, which they do not have
    main: Callable[[Context[AnyStage]], Result] = importlib.import_module(f"ray_jobs.{module}").main
    try:
        context = read_context(spec)
        started = now()
        join_ray(context.attempt)
        result = main(context)
        _commit(context, result, started)
    except Exception as error:
        if (reason := for_the_user(error, spec)) is None:
            raise  # a bug, or a failure that passes: another attempt may do better
        print(f"error: {reason}", file=sys.stderr, flush=True)
        sys.exit(2)


def for_the_user(error: BaseException, spec: str) -> str | None:
    """What the user has to fix before the attempt at `spec` can succeed; None where that is not why it failed."""
    for cause in causes(error):
        match cause:
            case StoreUnreachable():
                continue
            case UserError() | StoreError():
                return str(cause)
            case OSError(errno=errno.ENOSPC | errno.EDQUOT, filename=name):
                return f"no space for {name or spec}: {cause}; nothing was committed, free some and run again"
    return None


def causes(error: BaseException) -> list[BaseException]:
    """What was raised in the tasks, trials and workers whose failure Ray reports as `error`; else `error` itself.

    Ray's attributes are looked for, and not its classes: importing Ray Train takes seconds.
    """
    inner = getattr(error, "worker_failures", {}).values()  # WorkerGroupError
    found = [getattr(error, "cause", None), getattr(error, "controller_failure", None), *inner]
    return [cause for one in found if isinstance(one, BaseException) for cause in causes(one)] or [error]


def read_context(spec: str) -> Context[AnyStage]:
    """The attempt at `spec` (attempt.json's path or s3:// address), checked against this machine's store and code.

    Raises:
        StoreError: another store, or an input that is not committed.
        UserError: the code here is not the driver's.
    """
    uri, artifacts, name = spec.rpartition("/artifacts/")
    data = open_store(uri, create=False).read(f"{artifacts}{name}".lstrip("/")) if artifacts else None
    if data is None:
        raise StoreError(f"{spec}: there is no such attempt")
    attempt = Attempt.model_validate_json(data)
    code = identity.code_digest(attempt.job)
    if code != attempt.code_digest:
        raise UserError(
            f"the code of {attempt.job} here has digest {code[:12]}, the driver's {attempt.code_digest[:12]}: it "
            "changed since this attempt was planned (run again), or the cluster's nodes have another vitflow"
        )
    config: AnyStage = TypeAdapter(Stage).validate_python(attempt.config)
    store = Context(attempt, config, {}).open_store()
    inputs: dict[str, tuple[Manifest, ...]] = {}
    for name, references in attempt.inputs.items():
        manifests = [read_manifest(store, reference.job, reference.key) for reference in references]
        missing = [
            reference.key
            for reference, manifest in zip(references, manifests, strict=True)
            if manifest is None
        ]
        if missing:
            raise StoreError(f"input {name}: {missing} is not in {store.uri}")
        inputs[name] = tuple(manifest for manifest in manifests if manifest is not None)
    return Context(attempt, config, inputs)


def join_ray(attempt: Attempt) -> None:
    """Connect to the cluster that the job runs on (RAY_ADDRESS is set there), else to the attempt's."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read when ray is imported
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    # processes that the stage starts need it, too: Ray Train's cleaner would otherwise find the host's other Rays
    known = {} if address == "auto" else {"env_vars": {"RAY_ADDRESS": address}}
    ray.init(address=address, runtime_env=known, log_to_driver=True, logging_level="warning")
    # Ray's handler in Python once more, which ends the process, in place of one in C++ that prints a stack before
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _commit(context: Context[AnyStage], result: Result, started: str) -> None:
    attempt = context.attempt
    committed = commit(
        context.open_store(),
        Manifest(
            job=attempt.job,
            kind=context.config.KIND,
            key=attempt.key,
            content_digest=result.content_digest,
            stage=attempt.stage,
            run=attempt.run,
            attempt=attempt.number,
            nonce=attempt.nonce,
            files=result.files,
            inputs=attempt.inputs,
            config=attempt.config,
            source=attempt.source,
            metrics=result.metrics,
            timing_dependent=result.timing_dependent,
            code={"version": context.config.VERSION, "digest": attempt.code_digest, **identity.git_state()},
            environment=_environment(),
            started=started,
            finished=now(),
            user=who(),
        ),
    )
    if committed.nonce == attempt.nonce:
        print(f"committed {attempt.job}/{attempt.key[:12]}", flush=True)
    else:
        print(
            f"another attempt ({committed.attempt}) committed {attempt.job}/{attempt.key[:12]} first",
            flush=True,
        )


def _environment() -> dict[str, Any]:
    import ray

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),
        "cluster": {
            name: amount for name, amount in ray.cluster_resources().items() if name in {"CPU", "GPU"}
        },
        "packages": versions,
    }


def processor() -> str:
    """The processor's model name."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except FileNotFoundError:
        names = []
    return names[0] if names else platform.processor()
