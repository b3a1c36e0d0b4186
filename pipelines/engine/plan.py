"""What would run, what is cached, and why. Reads the store; changes nothing; imports neither torch nor ray."""

from __future__ import annotations

import graphlib
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pipelines import identity
from pipelines.recipe.pipeline import Pipeline, base
from pipelines.spec import AnyStage, Import, RecipeError, Report
from pipelines.store import (
    InputRef,
    Manifest,
    Store,
    StoreDamaged,
    all_manifests,
    is_committed,
    read_current,
    replace_artifact,
    successors,
)

READERS = 16  # manifests read at once: on S3 each takes a round trip


@dataclass(frozen=True)
class PlannedStage:
    """One stage as the store sees it now: committed (`manifest`), ready to run (`key`), waiting for its inputs,
    impossible (`lost`), or committed and `damaged`."""

    name: str
    config: AnyStage
    key: str | None = None
    manifest: Manifest | None = None
    reference: InputRef | None = None  # what a consumer records of it, where it is committed
    inputs: dict[str, list[InputRef]] | None = None
    source: str | None = None
    code: str | None = None  # the digest of its code, where that is in the key
    lost: str | None = None  # why it can't be made
    damaged: str | None = None  # what is damaged, and what to do

    @property
    def state(self) -> str:
        """cached | run | pending (an input is not finished, so the key is not known yet) | missing (its source can't be
        read) | skipped (an input is missing or skipped) | damaged (only `--force` rebuilds it)."""
        if self.lost is not None:
            return "skipped" if self.config.inputs() else "missing"
        if self.damaged is not None:
            return "damaged"
        return "pending" if self.key is None else "run" if self.manifest is None else "cached"


def pin(pipeline: Pipeline, names: Iterable[str]) -> Pipeline:
    """The pipeline with the commit written into each path on the Hugging Face hub of these stages.

    Raises:
        RecipeError: there is no such model or revision. StoreUnreachable: the hub does not answer.
    """
    stages = {name: pipeline.stages[name] for name in names}
    hub = {
        name: stage
        for name, stage in stages.items()
        if isinstance(stage, Import) and stage.path.startswith("hf:")
    }
    if not hub:
        return pipeline
    from pipelines.files.hub import pinned

    found = {name: stage.model_copy(update={"path": pinned(stage.path)}) for name, stage in hub.items()}
    return pipeline.model_copy(update={"stages": pipeline.stages | found})


def plan_pipeline(
    store: Store, pipeline: Pipeline, names: tuple[str, ...], strict_code: bool = False
) -> list[PlannedStage]:
    """The stages `names`, in running order; those that take nothing of each other are looked at at once.

    Args:
        names: as `Pipeline.needed_for` gives them: with all that they take.
        strict_code: the digest of a stage's code is in its key.

    Raises:
        RecipeError: a source can't be read; of a matrix that of every member, else these are `missing`.
    """
    sources, lost = _sources(pipeline, names)
    graph = pipeline.graph()
    generations = graphlib.TopologicalSorter({name: graph[name] for name in names})
    generations.prepare()
    planned: dict[str, PlannedStage] = {}
    committed: dict[str, InputRef] = {}

    def look(name: str) -> PlannedStage:
        config = pipeline.stages[name]
        if name in lost:
            return PlannedStage(name, config, lost=lost[name])
        remaining = without(config, lost)
        if remaining is None:
            first = next(given for given in graph[name] if given in lost)
            return PlannedStage(name, config, lost=f"{first} can't be made")
        return plan_stage(store, name, remaining, committed, strict_code, sources[_spelled(config)])

    with ThreadPoolExecutor(READERS) as readers:
        while generations:
            ready = generations.get_ready()
            for stage in readers.map(look, ready):
                planned[stage.name] = stage
                if stage.lost is not None:
                    lost[stage.name] = stage.lost
                if stage.reference is not None:
                    committed[stage.name] = stage.reference
            generations.done(*ready)
    return [planned[name] for name in names]


def without(config: AnyStage, lost: Container[str]) -> AnyStage | None:
    """A stage as it goes on without inputs that could not be made; None where it can't.

    A report does without some members of a matrix, and says which, while another member of the same stage is left.
    """
    given = [name for names in config.inputs().values() for name in names]
    kept = tuple(name for name in given if name not in lost)
    if len(kept) == len(given):
        return config
    if not isinstance(config, Report) or {*map(base, kept)} != {*map(base, given)}:
        return None
    missing = tuple(name for name in given if name in lost)
    return config.model_copy(update={"of": kept, "missing": missing})


def _sources(pipeline: Pipeline, names: Iterable[str]) -> tuple[dict[str, str | None], dict[str, str]]:
    """The fingerprints of what stages read (by `_spelled`), and of members of a matrix why theirs can't be read.

    Raises:
        RecipeError: no member's can, or a stage has no other members: then a recipe is wrong, not a file amiss.
    """
    found: dict[str, str | None] = {}  # many stages of a matrix may read one
    unreadable: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(base(name), []).append(name)
        spelled = _spelled(pipeline.stages[name])
        if spelled not in found.keys() | unreadable.keys():
            try:
                found[spelled] = identity.source_fingerprint(pipeline.stages[name])
            except RecipeError as error:
                unreadable[spelled] = str(error)
    lost = {
        name: unreadable[spelled]
        for own in members.values()
        for name in own
        if (spelled := _spelled(pipeline.stages[name])) in unreadable
    }
    for stage, own in members.items():
        if all(name in lost for name in own):
            several = f"\n  (and of {stage} no other member's can be read either)" if len(own) > 1 else ""
            raise RecipeError(f"{lost[own[0]]}{several}")
    return found, lost


def plan_stage(
    store: Store,
    name: str,
    config: AnyStage,
    committed: Mapping[str, InputRef],
    strict_code: bool = False,
    source: str | None = None,
) -> PlannedStage:
    """One stage, given what is committed of those that it takes; its `source` is looked at unless given."""
    named = config.inputs()
    if any(given not in committed for inputs in named.values() for given in inputs):
        return PlannedStage(name, config)
    inputs = {field: [committed[given] for given in inputs] for field, inputs in named.items()}
    if source is None:
        source = identity.source_fingerprint(config)
    code = identity.code_digest(config.job) if strict_code else None
    key = identity.stage_key(config, _digests(inputs), source, code)
    try:
        if (found := read_current(store, config.job, key)) is None:
            return PlannedStage(name, config, key, None, None, inputs, source, code)
        manifest, reference = found
        store.check_sizes(manifest.folder, manifest.files)
    except StoreDamaged as error:
        damaged = f"{error.problem}; {error.remedy or f'`--force {name}` rebuilds it'}"
        return PlannedStage(name, config, key, None, None, inputs, source, code, damaged=damaged)
    return PlannedStage(name, config, manifest.key, manifest, reference, inputs, source, code)


def _spelled(config: AnyStage) -> str:
    """Where a stage's files are; the same for all stages that read none."""
    return config.model_dump_json(include={"source", "path"})


def _digests(inputs: Mapping[str, list[InputRef]]) -> dict[str, list[str]]:
    return {field: [reference.content_digest for reference in given] for field, given in inputs.items()}


def force_stage(store: Store, planned: PlannedStage, nonce: str, run: str) -> str:
    """The key that a forced stage runs under: a successor of the present artifact, the same one however often asked.

    Args:
        nonce: the run's own, so that a continued run finds the successor that it made.
    """
    assert planned.key is not None and planned.inputs is not None
    job = planned.config.job
    key = identity.stage_key(planned.config, _digests(planned.inputs), planned.source, planned.code)
    while True:
        for following in successors(store, job, key):
            if following == identity.successor_key(key, nonce):
                return following
            key = following
        if not is_committed(store, job, key):
            return key  # nothing to replace; a damaged manifest would be something
        ours = identity.successor_key(key, nonce)
        if replace_artifact(store, job, key, ours, run, "--force"):
            return ours


def notes(stage: PlannedStage) -> Iterator[str]:
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


def reasons(store: Store, planned: Iterable[PlannedStage]) -> dict[str, str]:
    """Stage -> why it is in its state, in a few words."""
    stages = list(planned)
    before: dict[tuple[str, str], Manifest] = {}
    if any(stage.state == "run" for stage in stages):  # asks for all that was ever made
        before = {(manifest.job, manifest.stage): manifest for manifest in all_manifests(store)}
    return {stage.name: _reason(stage, before.get((stage.config.job, stage.name))) for stage in stages}


def _reason(stage: PlannedStage, before: Manifest | None) -> str:
    if (reason := stage.lost or stage.damaged) is not None:
        return reason
    if stage.state == "pending":
        return "waits for its inputs"
    if stage.manifest is not None:
        return f"made {stage.manifest.finished[:16].replace('T', ' ')} by {stage.manifest.run}"
    if before is None:
        return "never made"
    return (
        "; ".join(_differences(before, stage))
        or f"never made with{'' if stage.code else 'out'} --strict-code"
    )


def _differences(manifest: Manifest, stage: PlannedStage) -> Iterator[str]:
    if manifest.source != stage.source:
        yield "the source has changed"
    for field, references in (stage.inputs or {}).items():
        digests = [reference.content_digest for reference in references]
        if digests != [reference.content_digest for reference in manifest.inputs.get(field, [])]:
            yield f"{field} has changed"
    if manifest.code.get("version") != stage.config.VERSION:
        yield f"version {manifest.code.get('version')} -> {stage.config.VERSION} of {stage.config.job}"
    if stage.code is not None and manifest.code.get("digest") != stage.code:
        yield "its code has changed"
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
