"""The process of a stage: read the attempt, check it, join Ray, run the stage's `main`, commit its result.

    python -m ray_jobs.<module> --spec STORE/artifacts/<job>/<key>/attempts/<n>/attempt.json

A job's module defines `main(context) -> Result`: open the inputs, compute in Ray tasks or actors, write into
`context.staging()`. The module ends with a call of `run_stage` with its own name (`pipelines.spec.module` of the job).
Exit codes: 0 committed, 2 user error (never retried), 3 source files changed (planned anew), 1 anything else. While it
runs, the process shows signs of life, and it ends without a commit if a later attempt has taken over
(`ray_jobs.process.alive`).
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import json
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
from pipelines.spec import LAST, AnyStage, RecipeError, Stage
from pipelines.store import (
    MODEL_FILES,
    Attempt,
    FileEntry,
    Layout,
    Manifest,
    Staging,
    Store,
    StoreError,
    StoreUnreachable,
    Superseded,
    check_newest,
    commit,
    local_files,
    model_folder,
    now,
    open_store,
    read_manifest,
    remove_progress,
    who,
)
from ray_jobs.process.alive import show_alive
from vit_model.errors import UserError

if TYPE_CHECKING:
    from ray_jobs.data.shards import Dataset

PACKAGES = ("torch", "ray", "deepspeed", "pyarrow", "numpy", "pillow", "scikit-learn", "matplotlib")


Spec = TypeVar("Spec", bound=AnyStage, covariant=True)


class SourceChangedError(UserError):
    """Files of the source changed or went after the stage was planned, so its key is not theirs."""


AT_REST = "rerun when its files are no longer being written"


@dataclass(frozen=True)
class Context(Generic[Spec]):
    """The attempt, configuration and inputs of a stage. It is sent to Ray tasks; each task opens the store itself."""

    attempt: Attempt
    config: Spec
    inputs: dict[str, tuple[Manifest, ...]]

    def open_store(self) -> Store:
        """Open the store, and check that it is the one that the driver writes to.

        Raises:
            StoreError: on this machine the address leads to a different store.
        """
        store = open_store(self.attempt.store_uri, create=False)
        if store.id != self.attempt.store_id:
            raise StoreError(
                f"{store.uri} has id {store.id} here, but {self.attempt.store_id} on the driver's machine. "
                "Use a store that all machines share"
            )
        return store

    def input(self, name: str) -> Path:
        """Return the folder of the single artifact in the input field `name`.

        Of a model, it has model.safetensors and config.json: of the checkpoint that the field names, or the last.

        Raises:
            RecipeError: the artifact does not have this checkpoint.
        """
        (manifest,) = self.inputs[name]
        if manifest.kind == "model":
            return model_folder(self.open_store(), manifest, self.config.checkpoints().get(name, LAST))
        return local_files(self.open_store(), manifest)

    def dataset(self, cache_gib: float | None = None) -> Dataset:
        """Open the dataset in the input field `data`.

        Images on S3 are read on demand, through a cache of `cache_gib` GiB on this machine (None: the default size).
        """
        from ray_jobs.data.shards import CACHE_BYTES, open_artifact

        (manifest,) = self.inputs["data"]
        return open_artifact(
            self.open_store(), manifest, int(cache_gib * 2**30) if cache_gib else CACHE_BYTES
        )

    def listed(self) -> frozenset[str] | None:
        """Return the names of the source's files when the stage was planned; files that came later are left out.

        None: the plan did not record them.
        """
        data = self.open_store().read(Layout.listing(self.attempt.job, self.attempt.key))
        return None if data is None else frozenset(json.loads(data))

    def check_source(self, when: str) -> None:
        """Raise SourceChangedError if a file that the stage reads is no longer the one that it was planned with."""
        try:
            is_same = identity.listed_source(self.config, self.listed())[0] == self.attempt.source
        except RecipeError:  # a file is gone
            is_same = False
        if not is_same:
            raise SourceChangedError(f"the source changed {when}, after the run was planned; {AT_REST}")

    @contextmanager
    def staging(self) -> Iterator[Staging]:
        """Yield a local folder to write files into, see `Store.staging`."""
        with self.open_store().staging(
            Layout.files(self.attempt.job, self.attempt.key, self.attempt.number)
        ) as staging:
            yield staging


@dataclass(frozen=True)
class Result:
    """The files and metrics that a stage produced."""

    content_digest: str
    files: tuple[FileEntry, ...]
    metrics: dict[str, float | int | str] = field(default_factory=dict)
    timing_dependent: bool = False


def model_digest(files: tuple[FileEntry, ...]) -> str:
    """Return the content digest of a model artifact, computed from its weights and its contract."""
    return identity.sha256(
        identity.canonical_json({entry.path: entry.sha256 for entry in files if entry.path in MODEL_FILES})
    )


def run_stage(module: str) -> None:
    """Run the stage whose `main` is in `ray_jobs.<module>`, commit its result, and set the process's exit code."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--spec", required=True, help="the attempt.json of the attempt to run")
    spec: str = arguments.parse_args().spec
    # imported by name: objects that are sent to workers must not belong to __main__, which workers do not have
    main: Callable[[Context[AnyStage]], Result] = importlib.import_module(f"ray_jobs.{module}").main
    try:
        context = read_context(spec)
        started = now()
        with show_alive(context):
            join_ray()
            result = main(context)
            _commit(context, result, started)
    except Exception as error:
        if superseded := [cause for cause in causes(error) if isinstance(cause, Superseded)]:
            print(f"error: {superseded[0]}", file=sys.stderr, flush=True)
            sys.exit(1)  # the driver follows the later attempt
        if (reason := for_the_user(error)) is None:
            raise  # a bug or a transient failure: another attempt may succeed
        print(f"error: {reason}", file=sys.stderr, flush=True)
        sys.exit(3 if any(isinstance(cause, SourceChangedError) for cause in causes(error)) else 2)


def for_the_user(error: BaseException) -> str | None:
    """Return what the user has to fix before an attempt can succeed; None if it is not a user error."""
    for cause in causes(error):
        match cause:
            case StoreUnreachable():
                continue
            case UserError() | StoreError():
                return str(cause)
            case OSError(errno=errno.ENOSPC | errno.EDQUOT, filename=name):
                place = name or "the store, temporary files or the cache"
                return f"no space for {place}: {cause}. Nothing was committed; free some space and rerun"
    return None


def causes(error: BaseException) -> list[BaseException]:
    """Return the exceptions that were raised in tasks, trials and workers and that Ray wraps in `error`.

    If `error` wraps nothing, return `error` itself. Wrappers are recognised by their attributes and not by their
    classes, because importing Ray Train takes seconds.
    """
    failures = getattr(error, "worker_failures", {}).values()  # WorkerGroupError
    wrapped = [getattr(error, "cause", None), getattr(error, "controller_failure", None), *failures]
    return [cause for inner in wrapped if isinstance(inner, BaseException) for cause in causes(inner)] or [
        error
    ]


def read_context(spec: str) -> Context[AnyStage]:
    """Read the attempt at `spec`, and check it against this machine's store and code.

    Args:
        spec: the path or s3:// address of an attempt.json.

    Raises:
        StoreError: a different store, no such attempt, or an input that is not committed.
        UserError: this machine's code is not the driver's.
    """
    uri, artifacts, name = spec.rpartition("/artifacts/")
    data = open_store(uri, create=False).read(f"{artifacts}{name}".lstrip("/")) if artifacts else None
    if data is None:
        raise StoreError(f"{spec}: no such attempt")
    attempt = Attempt.model_validate_json(data)
    code = identity.code_digest(attempt.job)
    if code != attempt.code_digest:
        raise UserError(
            f"the code of {attempt.job} here has digest {code[:12]}, the driver's {attempt.code_digest[:12]}. If the "
            "code changed after the attempt was planned, rerun; else install the driver's vitflow on the cluster"
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
            raise StoreError(f"input {name}: {', '.join(missing)} not found in {store.uri}")
        inputs[name] = tuple(manifest for manifest in manifests if manifest is not None)
    return Context(attempt, config, inputs)


def join_ray() -> None:
    """Connect to the cluster that the job runs on, where RAY_ADDRESS is set."""
    # ray reads it during its import
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    # child processes need it too: Ray Train's cleaner would otherwise connect to another Ray of the host
    runtime_env = {} if address == "auto" else {"env_vars": {"RAY_ADDRESS": address}}
    ray.init(address=address, runtime_env=runtime_env, log_to_driver=True, logging_level="warning")
    # Reinstall Ray's Python handler, which ends the process quietly; ray.init installed a C++ one that prints a stack.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _commit(context: Context[AnyStage], result: Result, started: str) -> None:
    attempt, store = context.attempt, context.open_store()
    manifest = Manifest(
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
        code={
            "version": context.config.version,
            "scheme": identity.CODE_SCHEME,
            "digest": attempt.code_digest,
            **identity.git_state(),
        },
        environment=_environment(),
        started=started,
        finished=now(),
        user=who(),
    )
    check_newest(store, attempt)
    committed = commit(store, manifest)
    if committed.nonce == attempt.nonce:
        print(f"committed {attempt.job}/{attempt.key[:12]}", flush=True)
    else:
        print(
            f"another attempt ({committed.attempt}) committed {attempt.job}/{attempt.key[:12]} first",
            flush=True,
        )
    remove_progress(store, attempt.job, attempt.key)


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
    """Return the processor's model name."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except FileNotFoundError:
        names = []
    return names[0] if names else platform.processor()
