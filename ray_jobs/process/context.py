"""A stage's arguments and its return value: attempt, configuration and inputs (`Context`), and `Result`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from pipelines import identity
from pipelines.spec import LAST, AnyStage, RecipeError, Stage
from pipelines.store import (
    Attempt,
    FileEntry,
    Layout,
    Manifest,
    Staging,
    Store,
    StoreError,
    local_files,
    model_folder,
    open_store,
    read_manifest,
    wait_for_store,
    warn,
)
from ray_jobs.data.shards import CACHE_BYTES, Dataset, open_artifact
from vit_model.contract import MODEL_FILES
from vit_model.errors import UserError

Spec = TypeVar("Spec", bound=AnyStage, covariant=True)


class SourceChangedError(UserError):
    """Files of the source, or an input, changed or vanished after the stage was planned."""


# As long as workers wait for each other. Limited, because the driver does not see that a worker waits.
OPEN_SECONDS = 600.0
AT_REST = "rerun when its files are no longer being written"


@dataclass(frozen=True)
class Context(Generic[Spec]):
    """The attempt, configuration and inputs of a stage. It is sent to Ray tasks; each task opens the store itself."""

    attempt: Attempt
    config: Spec
    inputs: dict[str, tuple[Manifest, ...]]

    def open_store(self) -> Store:
        """Open the store, and check that it is the store that the driver writes to.

        Raises:
            StoreUnreachable: it has not answered for OPEN_SECONDS.
            StoreError: on this machine the address belongs to a different store.
        """
        store = wait_for_store(partial(open_store, self.attempt.store_uri, create=False), warn, OPEN_SECONDS)
        if store.id != self.attempt.store_id:
            raise StoreError(
                f"{store.uri} has id {store.id} here, but {self.attempt.store_id} on the driver's machine. "
                "Use a store that all machines share"
            )
        return store

    def input(self, name: str) -> Path:
        """Return the folder of the single artifact in the input field `name`.

        A model's folder has model.safetensors and config.json of the checkpoint that the field names, or of the last.

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
        (manifest,) = self.inputs["data"]
        return open_artifact(self.open_store(), manifest, int(cache_gib * 2**30) if cache_gib else CACHE_BYTES)

    def listed(self) -> frozenset[str] | None:
        """Return the names of the source's files when the stage was planned; files that came later are left out.

        None: the plan did not record them.
        """
        data = self.open_store().read(Layout.listing(self.attempt.job, self.attempt.key))
        return None if data is None else frozenset(json.loads(data))

    def check_source(self, when: str) -> None:
        """Raise SourceChangedError if a file that the stage reads has changed since it was planned."""
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


def read_context(spec: str) -> Context[AnyStage]:
    """Read the attempt at `spec`, and check it against this machine's store and code.

    Args:
        spec: the path or s3:// address of an attempt.json.

    Raises:
        StoreError: a different store, or no such attempt.
        SourceChangedError: an input was removed.
        UserError: this machine's code differs from the driver's.
    """
    uri, artifacts, name = spec.rpartition("/artifacts/")
    data = open_store(uri, create=False).read(f"{artifacts}{name}".lstrip("/")) if artifacts else None
    if data is None:
        raise StoreError(f"{spec}: no such attempt")
    attempt = Attempt.model_validate_json(data)
    code = identity.code_digest(attempt.job)
    if code != attempt.code_digest:
        raise UserError(
            f"the code of {attempt.job} has digest {code[:12]} here, but {attempt.code_digest[:12]} on the driver's "
            "machine. If the code changed after planning, rerun; otherwise install the driver's vitflow on the cluster"
        )
    config: AnyStage = TypeAdapter(Stage).validate_python(attempt.config)
    store = Context(attempt, config, {}).open_store()
    inputs: dict[str, tuple[Manifest, ...]] = {}
    for name, references in attempt.inputs.items():
        manifests = [read_manifest(store, reference.job, reference.key) for reference in references]
        missing = [reference.key for reference, manifest in zip(references, manifests, strict=True) if manifest is None]
        if missing:
            raise SourceChangedError(f"input {name}: {', '.join(missing)} not found in {store.uri}")
        inputs[name] = tuple(manifest for manifest in manifests if manifest is not None)
    return Context(attempt, config, inputs)
