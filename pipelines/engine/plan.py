"""Plan a run: which stages are cached, which would run, and why. Reads the store and changes nothing."""

from __future__ import annotations

import graphlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from pipelines import identity
from pipelines.engine.history import READERS, RECENT, newest_results, runs_of
from pipelines.engine.latest import Newest, named_models, stored_inputs
from pipelines.environment import environment
from pipelines.files.weights import lacks_preprocessing
from pipelines.recipe.pipeline import Pipeline, base
from pipelines.spec import (
    LAST,
    UNSTATED,
    AnyStage,
    Import,
    Ingest,
    Pretrain,
    RecipeError,
    Report,
    recorded_checkpoint,
)
from pipelines.store import (
    InputRef,
    Manifest,
    Store,
    StoreDamaged,
    contract_of,
    current,
    is_committed,
    read_manifest,
    replace_artifact,
    successors,
    weights_file,
)
from vit_model.contract import ModelContract

NAMED = 3  # stages in a note


@dataclass(frozen=True)
class PlannedStage:
    """A stage and its state in the store: committed (`manifest`), ready to run (`key`), waiting for its inputs,
    impossible (`lost`), or committed and `damaged`."""

    name: str
    config: AnyStage
    key: str | None = None
    manifest: Manifest | None = None
    reference: InputRef | None = None  # the record of it in a consumer's manifest, if it is committed
    inputs: dict[str, list[InputRef]] | None = None
    source: str | None = None
    files: tuple[str, ...] = ()  # the names of the source's files, if this plan has looked
    code: str | None = None  # the digest of its code, if that is in the key
    lost: str | None = None  # why it cannot be made
    damaged: str | None = None  # what is damaged, and what to do

    @property
    def state(self) -> str:
        """cached | run | pending (an input is not finished, so the key is not known yet) | missing (its source cannot
        be read) | skipped (an input is missing or skipped) | damaged (only `--force` rebuilds it)."""
        if self.lost is not None:
            return "skipped" if self.config.inputs() else "missing"
        if self.damaged is not None:
            return "damaged"
        return "pending" if self.key is None else "run" if self.manifest is None else "cached"


def plan_pipeline(
    store: Store,
    pipeline: Pipeline,
    names: tuple[str, ...],
    strict_code: bool = False,
    forced: Container[str] = (),
    latest: Newest | None = None,
) -> list[PlannedStage]:
    """Plan the stages `names`, in running order; stages that do not depend on each other are planned concurrently.

    Args:
        names: as `Pipeline.needed_for` returns them, with all their inputs.
        strict_code: include the digest of a stage's code in its key.
        forced: stages that will be rerun even if they are cached.
        latest: the models that `latest` and aliases named when a run was planned; None looks them up.

    Raises:
        RecipeError: a committed model does not have the checkpoint that a stage names, or does not fit the stage that
            starts from it; or a source cannot be read. For a matrix: no member's source can be read; otherwise the
            members with unreadable sources are `missing`.
    """
    sources, lost = _sources(pipeline, names)
    newest = named_models(store, pipeline, names).models if latest is None else latest
    graph = pipeline.graph()
    generations = graphlib.TopologicalSorter({name: graph[name] for name in names})
    generations.prepare()
    planned: dict[str, PlannedStage] = {}
    committed: dict[str, InputRef] = {}

    def plan(name: str) -> PlannedStage:
        config = pipeline.stages[name]
        if name in lost:
            return PlannedStage(name, config, lost=lost[name])
        remaining = without(config, lost)
        if remaining is None:
            first = next(source for source in graph[name] if source in lost)
            return PlannedStage(name, config, lost=f"{first} cannot be made")
        if any(config.inputs()[field][0] in forced for field in config.checkpoints()):
            return PlannedStage(name, config)  # a rerun may keep other checkpoints
        source = sources[_source_fields(config)]
        return plan_stage(store, name, remaining, committed, strict_code, source, newest)

    with environment().pool(READERS) as readers:
        while generations:
            ready = generations.get_ready()
            for stage in readers.map(plan, ready):
                planned[stage.name] = stage
                if stage.lost is not None:
                    lost[stage.name] = stage.lost
                if stage.reference is not None:
                    committed[stage.name] = stage.reference
            generations.done(*ready)
    return [planned[name] for name in names]


def rerun(planned: Iterable[PlannedStage], forced: Container[str]) -> Iterator[PlannedStage]:
    """Yield planned stages for a run that reruns the forced ones: stages after these wait for their results."""
    unmade: set[str] = set()
    for stage in planned:
        waits = any(name in unmade for names in stage.config.inputs().values() for name in names)
        again = stage
        if stage.lost is None and (waits or stage.name in forced):
            key = None if waits else stage.key
            again = replace(stage, key=key, manifest=None, reference=None, damaged=None)
        if again.state in {"run", "pending"}:
            unmade.add(stage.name)
        yield again


def without(config: AnyStage, lost: Container[str]) -> AnyStage | None:
    """Return a stage without the inputs that could not be made; None if it needs them.

    A report does not need every member of a matrix, as long as one of each stage is left. It lists the missing ones.
    """
    inputs = [name for names in config.inputs().values() for name in names]
    kept = tuple(name for name in inputs if name not in lost)
    if len(kept) == len(inputs):
        return config
    if not isinstance(config, Report) or {*map(base, kept)} != {*map(base, inputs)}:
        return None
    missing = tuple(name for name in inputs if name in lost)
    return config.model_copy(update={"of": kept, "missing": missing})


def _sources(pipeline: Pipeline, names: Iterable[str]) -> tuple[dict[str, str | None], dict[str, str]]:
    """Return the fingerprints of the stages' sources, by `_source_fields`, and errors of unreadable ones, by stage.

    Raises:
        RecipeError: no member of a stage has a readable source: the recipe is wrong, not a single file.
    """
    fingerprints: dict[str, str | None] = {}  # many stages of a matrix may read one source
    unreadable: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(base(name), []).append(name)
        source = _source_fields(pipeline.stages[name])
        if source not in fingerprints.keys() | unreadable.keys():
            try:
                fingerprints[source] = identity.source_fingerprint(pipeline.stages[name])
            except RecipeError as error:
                unreadable[source] = str(error)
    lost = {
        name: unreadable[source]
        for group in members.values()
        for name in group
        if (source := _source_fields(pipeline.stages[name])) in unreadable
    }
    for stage, group in members.items():
        if all(name in lost for name in group):
            others = f"\n  (the sources of all other members of {stage} are unreadable, too)"
            raise RecipeError(f"{lost[group[0]]}{others * (len(group) > 1)}")
    return fingerprints, lost


def plan_stage(
    store: Store,
    name: str,
    config: AnyStage,
    committed: Mapping[str, InputRef],
    strict_code: bool = False,
    source: str | None = None,
    newest: Newest = MappingProxyType({}),
) -> PlannedStage:
    """Plan one stage, given its committed inputs; the fingerprint of its source is computed if `source` is None.

    Args:
        newest: the models that `latest` and aliases named when the run was planned.

    Raises:
        RecipeError: the source cannot be read, or an input does not have the checkpoint that the stage names, or does
            not fit the model that starts from it or imitates it, or an import has no mean and std.
    """
    input_names = config.inputs()
    if any(name not in committed for names in input_names.values() for name in names):
        return PlannedStage(name, config)
    inputs = {field: [committed[name] for name in names] for field, names in input_names.items()}
    files: tuple[str, ...] = ()
    if source is None:
        source, files = identity.listed_source(config)
    code = identity.code_digest(config.job) if strict_code else None
    inputs |= stored_inputs(store, name, config, inputs, newest, source, code)
    key = identity.stage_key(config, _digests(inputs), source, code)
    try:
        key, found = current(store, config.job, key)
        if found is None:
            _check_checkpoints(store, name, config, inputs)
            _check_start(store, name, config, inputs)
            _check_teacher(store, name, config, inputs)
            _check_import(name, config)
            return PlannedStage(name, config, key, None, None, inputs, source, files, code)
        manifest, reference = found
        store.check_sizes(manifest.folder, manifest.files)
    except StoreDamaged as error:
        damaged = f"{error.problem}; {error.remedy or f'`--force {name}` rebuilds it'}"
        return PlannedStage(name, config, key, None, None, inputs, source, files, code, damaged=damaged)
    return PlannedStage(name, config, manifest.key, manifest, reference, inputs, source, files, code)


def _check_checkpoints(store: Store, name: str, config: AnyStage, inputs: Mapping[str, list[InputRef]]) -> None:
    """Raise RecipeError if an input does not have the checkpoint that a stage names."""
    for field, checkpoint in config.checkpoints().items():
        (reference,) = inputs[field]
        if (manifest := read_manifest(store, reference.job, reference.key)) is not None:  # the stage reports it
            weights_file(store, manifest, checkpoint, f"stages.{name}.{field}: ")


def _check_start(store: Store, name: str, config: AnyStage, inputs: Mapping[str, list[InputRef]]) -> None:
    """Raise RecipeError if the model that a pretraining starts from is not its own model's encoder."""
    if not isinstance(config, Pretrain) or "init_from" not in inputs:
        return
    if (found := _find_model(store, inputs["init_from"])) is None:
        return
    stage, contract = found
    try:
        config.check_start(f"stages.{name}.init_from: {stage}", contract.architecture)
    except RecipeError as error:
        if "init_from" not in config.from_store():
            raise
        remedy = f"Change model back, or train new weights with --set {name}.init_from=null"
        raise RecipeError(f"{error}. {remedy}") from None


def _check_teacher(store: Store, name: str, config: AnyStage, inputs: Mapping[str, list[InputRef]]) -> None:
    """Raise RecipeError if a pretraining cannot imitate its teacher; the stage itself compares the classes."""
    if not isinstance(config, Pretrain) or "teacher" not in inputs:
        return
    if (found := _find_model(store, inputs["teacher"])) is None:
        return
    stage, contract = found
    where = f"stages.{name}.teacher: {stage}"
    config.check_teacher(where, contract.preprocessing.resolution, bool(contract.class_names))


def _check_import(name: str, config: AnyStage) -> None:
    """Raise RecipeError if neither an import nor its local files give mean and std; the stage checks other files."""
    if isinstance(config, Import) and config.preprocessing is None and lacks_preprocessing(config.path):
        raise RecipeError(f"stages.{name}.preprocessing: {config.path} {UNSTATED}")


def _find_model(store: Store, inputs: list[InputRef]) -> tuple[str, ModelContract] | None:
    """Return the name and the contract of an input's model; None if a file is missing, which the stage reports."""
    (reference,) = inputs
    manifest = read_manifest(store, reference.job, reference.key)
    if manifest is None or (contract := contract_of(store, manifest)) is None:
        return None
    return f"{manifest.stage} ({manifest.job} {manifest.key[:12]})", contract


def _source_fields(config: AnyStage) -> str:
    """Return the fields with the location of a stage's files; the same text for all stages that read none."""
    return config.model_dump_json(include={"source", "path", "exclude"})


def _digests(inputs: Mapping[str, list[InputRef]]) -> dict[str, list[str]]:
    return {field: [reference.content_digest for reference in references] for field, references in inputs.items()}


def force_stage(store: Store, planned: PlannedStage, nonce: str, run: str) -> str:
    """Return the key of a forced stage: a successor of the current artifact, the same one at every call.

    Args:
        nonce: the run's nonce, by which a continued run finds the successor that it created.
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
            return key  # nothing to replace; a damaged manifest is replaced
        following = identity.successor_key(key, nonce)
        if replace_artifact(store, job, key, following, run, "--force"):
            return following


def notes(stages: Iterable[PlannedStage]) -> Iterator[str]:
    """Yield notes: which models of the store stages take, and that the code of cached ones has changed, by commit."""
    changed: dict[str, list[str]] = {}
    for stage in stages:
        if stage.manifest is not None:
            code = stage.manifest.code
            if code.get("digest") != identity.code_digest(stage.config.job):
                commit = f" since commit {code['git'][:10]}" if "git" in code else ""
                changed.setdefault(commit, []).append(stage.name)
        elif stage.inputs is not None:
            for field, named in stage.config.from_store().items():
                model = stage.inputs.get(field)
                nothing = "no model yet" + ", so new weights" * (field == "init_from")
                yield f"{stage.name}: {field} {named}: {f'{model[0].job} {model[0].key[:12]}' if model else nothing}"
    for commit, (name, *others) in changed.items():
        if others:
            shown = ", ".join((name, *others[: NAMED - 1])) + f" and {len(others) + 1 - NAMED} more" * (
                len(others) >= NAMED
            )
            yield f"{shown}: their code has changed{commit}; `--force STAGE` reruns one"
        else:
            yield f"{name}: its code has changed{commit}; `--force {name}` reruns it"


def reasons(
    planned: Iterable[PlannedStage], previous: Mapping[str, Manifest], forced: Container[str] = ()
) -> dict[str, str]:
    """Return a short reason for each stage's state.

    Args:
        previous: stage -> its result in the newest of the recipe's RECENT runs that has one.
    """
    return {
        stage.name: "--force"
        if stage.state == "run" and stage.name in forced
        else _reason(stage, previous.get(stage.name))
        for stage in planned
    }


def previous_results(store: Store, pipeline: str, planned: Iterable[PlannedStage]) -> dict[str, Manifest]:
    """Return the result of each stage that would run, in the newest of the recipe's RECENT runs that has one.

    Args:
        pipeline: the recipe's name.
    """
    jobs = {stage.name: stage.config.job for stage in planned if stage.state in {"run", "pending"}}
    found = newest_results(store, islice(runs_of(store, pipeline), RECENT), jobs)
    return {name: manifest for name, (manifest, _) in found.items()}


def _reason(stage: PlannedStage, previous: Manifest | None) -> str:
    if (reason := stage.lost or stage.damaged) is not None:
        return reason
    if stage.state == "pending":
        return "waits for its inputs"
    if stage.manifest is not None:
        return f"made {stage.manifest.finished[:16].replace('T', ' ')} by {stage.manifest.run}"
    if previous is None:
        return "not made in recent runs"
    return "; ".join(_differences(previous, stage)) or f"never made with{'' if stage.code else 'out'} --strict-code"


def _differences(manifest: Manifest, stage: PlannedStage) -> Iterator[str]:
    if manifest.source != stage.source:
        excludes = isinstance(stage.config, Ingest) and bool(stage.config.exclude)
        yield f"the source{' or the list that it excludes' * excludes} has changed"
    inputs = stage.inputs or {}
    for field in dict.fromkeys([*inputs, *manifest.inputs]):
        digests = [reference.content_digest for reference in inputs.get(field, [])]
        if digests != [reference.content_digest for reference in manifest.inputs.get(field, [])]:
            yield f"{field} has changed"
        before, now = recorded_checkpoint(manifest.config, field), stage.config.checkpoints().get(field, LAST)
        if before != now:
            yield f"{field}.checkpoint {before} -> {now}"
    if manifest.code.get("version") != stage.config.version:
        yield f"version {manifest.code.get('version')} -> {stage.config.version} of {stage.config.job}"
    if stage.code is not None and manifest.code.get("digest") != stage.code:
        yield "its code has changed"
    yield from changed_fields(_identity(manifest.config, stage.config), identity.identity_fields(stage.config))


def _identity(then: Mapping[str, Any], config: AnyStage) -> dict[str, Any]:
    """Return the identity fields of a recorded configuration; all its fields if it no longer validates."""
    try:
        return identity.identity_fields(type(config).model_validate(then))
    except ValueError:
        return dict(then)


def changed_fields(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a line for each field of `now` whose value in `then` is another one."""
    for name, value in now.items():
        before = then.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            yield from changed_fields(before, value, f"{prefix}{name}.")
        elif before != value:
            old, new = ([*each] if isinstance(each, tuple) else each for each in (before, value))  # as in YAML
            yield f"{prefix}{name} {old} -> {new}"
