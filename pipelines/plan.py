"""What would run, what is cached, and why. Reads the store; changes nothing; imports neither torch nor ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines import identity
from pipelines.spec import AnyStage, Ingest, Pipeline
from pipelines.store import (
    InputRef,
    Manifest,
    Store,
    all_manifests,
    current_key,
    input_ref,
    read_manifest,
    replace_artifact,
    successor,
)


@dataclass(frozen=True)
class PlannedStage:
    """One stage as the store sees it now: committed (`manifest`), ready to run (`key`), or waiting for its inputs."""

    name: str
    config: AnyStage
    key: str | None = None
    manifest: Manifest | None = None
    inputs: dict[str, list[InputRef]] | None = None
    source: str | None = None

    @property
    def state(self) -> str:
        """cached | run | pending (an input is not finished, so the key is not known yet)."""
        return "pending" if self.key is None else "run" if self.manifest is None else "cached"


def plan_pipeline(store: Store, pipeline: Pipeline, names: tuple[str, ...]) -> list[PlannedStage]:
    """The stages `names`, in running order.

    Raises:
        RecipeError: a source can't be read.
    """
    committed: dict[str, Manifest] = {}
    planned = []
    for name in names:
        stage = plan_stage(store, name, pipeline.stages[name], committed)
        if stage.manifest is not None:
            committed[name] = stage.manifest
        planned.append(stage)
    return planned


def plan_stage(store: Store, name: str, config: AnyStage, committed: Mapping[str, Manifest]) -> PlannedStage:
    """One stage, given the manifests of those that are committed."""
    named = config.inputs()
    if any(given not in committed for inputs in named.values() for given in inputs):
        return PlannedStage(name, config)
    references = {
        field: [input_ref(store, committed[given]) for given in inputs] for field, inputs in named.items()
    }
    source = identity.source_fingerprint(config) if isinstance(config, Ingest) else None
    digests = {
        field: [reference.content_digest for reference in given] for field, given in references.items()
    }
    key = current_key(store, config.job, identity.stage_key(config, digests, source))
    return PlannedStage(name, config, key, read_manifest(store, config.job, key), references, source)


def force_stage(store: Store, planned: PlannedStage, nonce: str, run: str) -> str:
    """The key that a forced stage runs under: a successor of the present artifact, the same one however often asked.

    Args:
        nonce: the run's own, so that a continued run finds the successor that it made.
    """
    assert planned.key is not None and planned.inputs is not None
    digests = {field: [ref.content_digest for ref in given] for field, given in planned.inputs.items()}
    job, key = planned.config.job, identity.stage_key(planned.config, digests, planned.source)
    while True:
        ours = identity.successor_key(key, nonce)
        following = successor(store, job, key)
        if following == ours:
            return ours
        if following is None:
            if read_manifest(store, job, key) is None:
                return key  # nothing to replace
            if replace_artifact(store, job, key, ours, run, "--force"):
                return ours
        else:
            key = following


def notes(store: Store, stage: PlannedStage) -> Iterator[str]:
    """What a reader should know of a cached stage: its code, or bytes behind it, changed since."""
    if stage.manifest is None:
        return
    code = stage.manifest.code
    if code.get("digest") != identity.code_digest(stage.config.job):
        since = f" (it was made at {code['git'][:10]})" if "git" in code else ""
        yield f"{stage.name}: its code has changed since{since}; `--force {stage.name}` runs it again"
    for field, references in (stage.inputs or {}).items():
        for now, then in zip(references, stage.manifest.inputs.get(field, []), strict=False):
            if now.manifest_sha256 != then.manifest_sha256 and now.key != then.key:
                keys = f"{then.key[:12]} -> {now.key[:12]}"
                yield f"{stage.name}: {field} was made again ({keys}) with the same content, so this stands"


def reason(store: Store, stage: PlannedStage) -> str:
    """Why a stage is in its state, in a few words."""
    if stage.state == "pending":
        return "waits for its inputs"
    if stage.manifest is not None:
        return f"made {stage.manifest.finished[:16].replace('T', ' ')} by {stage.manifest.run}"
    before = [
        manifest
        for manifest in all_manifests(store)
        if manifest.job == stage.config.job and manifest.stage == stage.name
    ]
    if not before:
        return "never made"
    return "; ".join(_differences(before[-1], stage)) or "replaced"


def _differences(manifest: Manifest, stage: PlannedStage) -> Iterator[str]:
    if manifest.source != stage.source:
        yield "the source has changed"
    for field, references in (stage.inputs or {}).items():
        digests = [reference.content_digest for reference in references]
        if digests != [reference.content_digest for reference in manifest.inputs.get(field, [])]:
            yield f"{field} has changed"
    if manifest.code.get("version") != stage.config.VERSION:
        yield f"version {manifest.code.get('version')} -> {stage.config.VERSION} of {stage.config.job}"
    yield from _changed_fields(
        _identity(manifest.config, stage.config), identity.identity_fields(stage.config)
    )


def _identity(then: Mapping[str, Any], config: AnyStage) -> dict[str, Any]:
    """The identity fields of a recorded configuration; as it was recorded where it no longer validates."""
    try:
        return identity.identity_fields(type(config).model_validate(then))
    except ValueError:
        return dict(then)


def _changed_fields(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in now.items():
        before = then.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            yield from _changed_fields(before, value, f"{prefix}{name}.")
        elif before != value:
            yield f"{prefix}{name} {before} -> {value}"
