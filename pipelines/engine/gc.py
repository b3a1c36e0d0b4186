"""Garbage collection: which artifacts nothing needs, and their deletion.

In: a store and a `Policy`. Out: a `Collection`. An artifact is needed if an alias names it or named it lately, if a
recent run used it, if it is new or still being made, and if another needed artifact was made from it. All other ones
are listed in a record, and deleted at least its grace period later, less what is needed by then.
`pipelines.store.keeping` describes the records and what runs do with them.

A gc may be killed at any request, and several may run at once. What is deleted is written down once, before the first
object goes; the next gc finishes it. Of each artifact the manifest goes first, so what is left of it is not committed.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from pipelines.engine.history import is_run, plan_of, position_of, recipe_of, runs, stage_keys
from pipelines.environment import environment
from pipelines.spec import TRAINED
from pipelines.store import (
    Deletes,
    Garbage,
    GcRecord,
    InputRef,
    Layout,
    Manifest,
    Store,
    StoreDamaged,
    StoreError,
    alias_history,
    alias_names,
    all_manifests,
    contract_of,
    encode,
    is_committed,
    last_attempt,
    now,
    numbers,
    open_record,
    read_deletes,
    read_events,
    retire,
    successor,
    warn,
    who,
)
from vit_model.contract import WEIGHTS_FILE

ALIAS_DEPTH = 10  # targets of each alias that are kept, the current one included
LISTED = 50_000  # artifacts of one record, at most; the others follow with the next one
SIGN_SECONDS = 300.0  # after which an attempt whose sign of life is still the same is not running
DELETERS = 8  # artifacts that are deleted at once

Artifact = tuple[str, str]
"""(job, key)"""

# Why an artifact is kept, the first that applies.
ALIAS, RUN, NEW, UNFINISHED, DAMAGED, KEPT, LINEAGE = (
    "an alias names it, or did lately",
    "a recent run used it",
    "it is new",
    "it is being made",
    "its manifest is damaged; `vitflow verify` says what to do",
    "it was used since it was listed",
    "another one was made from it",
)


@dataclass(frozen=True)
class Policy:
    """What is kept besides what aliases name: the last runs of each recipe, and all that is younger, at least a day."""

    keep_runs: int = 5
    keep_days: float = 30.0


@dataclass(frozen=True)
class Node:
    """An artifact. `changed`: when it was finished, or its newest attempt was written; `inputs`: what it needs."""

    garbage: Garbage
    changed: str
    inputs: tuple[Artifact, ...]
    is_damaged: bool = False


@dataclass
class Graph:
    """All artifacts, and what else than inputs leads from one to another."""

    nodes: dict[Artifact, Node] = field(default_factory=dict)
    replaced: dict[Artifact, Artifact] = field(default_factory=dict)
    imported: dict[Artifact, Manifest] = field(default_factory=dict)
    trained: dict[str, list[Artifact]] = field(default_factory=lambda: defaultdict(list))
    """The sha256 of weights -> the trainings that made them."""
    datasets: dict[str, list[Artifact]] = field(default_factory=lambda: defaultdict(list))
    """The digest of a content -> the datasets with it."""


@dataclass(frozen=True)
class Collection:
    """What a gc found and did."""

    kept: dict[str, list[Garbage]]
    """Why -> artifacts."""
    unneeded: tuple[Garbage, ...]
    deleted: tuple[Garbage, ...] = ()
    record: int | None = None
    """The open record."""
    due: str | None = None
    """When what it lists may be deleted."""


def collect(store: Store, policy: Policy, grace_hours: float | None = None) -> Collection:
    """Delete what an earlier gc listed, if that is due, and list what nothing needs now.

    Args:
        grace_hours: between listing and deleting; 0 deletes at once. None: change nothing.

    Raises:
        StoreDamaged: an alias, a record of a gc or an attempt cannot be read, so what it needs is unknown.
    """
    deleted: list[Garbage] = []
    opened = open_record(store)
    if grace_hours is not None and opened is not None and _is_due(opened[1]):
        deleted += _delete(store, policy, *opened)
        opened = None
    kept, unneeded = _survey(store, policy)
    if grace_hours is not None and opened is None and unneeded:
        opened = _list(store, unneeded, grace_hours)
        if _is_due(opened[1]):
            deleted += _delete(store, policy, *opened)
            opened = None
            kept, unneeded = _survey(store, policy)
    number, due = (None, None) if opened is None else (opened[0], _due(opened[1]).isoformat())
    return Collection(kept, tuple(unneeded), tuple(deleted), number, due)


# ------------------------------------------------------------------------------------------------- what is needed


def reach(
    roots: Iterable[tuple[Artifact, str]], edges: Callable[[Artifact], Iterable[Artifact]]
) -> dict[Artifact, str]:
    """Return why each artifact is needed: the reason of the first root that it is, otherwise LINEAGE."""
    found: dict[Artifact, str] = {}
    for root, why in roots:
        found.setdefault(root, why)
    pending = list(found)
    while pending:
        for other in edges(pending.pop()):
            if other not in found:
                found[other] = LINEAGE
                pending.append(other)
    return found


def _survey(
    store: Store, policy: Policy, closed: tuple[int, GcRecord] | None = None
) -> tuple[dict[str, list[Garbage]], list[Garbage]]:
    """Return the needed artifacts, by the reason, and the others, newest first.

    Args:
        closed: the record whose artifacts are to be deleted; what it does not list counts as needed.
    """
    # Artifacts first: what is committed meanwhile belongs to a run that is read afterwards.
    graph = read_graph(store)
    needed = reach(_roots(store, graph, policy, closed), partial(_edges, store, graph))
    kept: dict[str, list[Garbage]] = defaultdict(list)
    for artifact, why in needed.items():
        if artifact in graph.nodes:
            kept[why].append(graph.nodes[artifact].garbage)
    others = sorted((node.changed, artifact) for artifact, node in graph.nodes.items() if artifact not in needed)
    return dict(kept), [graph.nodes[artifact].garbage for _, artifact in reversed(others)]


def read_graph(store: Store) -> Graph:
    """Read all artifacts, and those that replaced others."""
    graph = Graph()
    for manifest in all_manifests(store):
        _add(graph, manifest)
    for job in store.names("artifacts"):
        folder = f"artifacts/{job}"
        manifests, replaced = (
            store.versions(folder, [name], "attempts") for name in ("manifest.json", "replaced.json")
        )
        for key, version in manifests.items():
            is_replaced = replaced.get(key) is not None
            if is_replaced and (following := successor(store, job, key)) is not None:
                graph.replaced[job, key] = (job, following)
            if (job, key) in graph.nodes:
                continue
            # without versions (""), each one is looked at
            is_made = version is not None and (version != "" or is_committed(store, job, key))
            if is_made or not is_replaced:  # otherwise it was deleted
                graph.nodes[job, key] = _without_manifest(store, job, key, is_made)
    return graph


def _add(graph: Graph, manifest: Manifest) -> None:
    artifact = (manifest.job, manifest.key)
    size = sum(file.size for file in manifest.files)
    garbage = Garbage(**_names(manifest), bytes=size, is_finished=True)
    graph.nodes[artifact] = Node(garbage, manifest.finished, _keys(manifest.inputs))
    weights = {file.sha256 for file in manifest.files if file.path.endswith(WEIGHTS_FILE)}
    if manifest.job in TRAINED:
        for sha in weights:
            graph.trained[sha].append(artifact)
    elif weights:
        graph.imported[artifact] = manifest
    if manifest.kind == "dataset":
        graph.datasets[manifest.content_digest].append(artifact)


def _without_manifest(store: Store, job: str, key: str, is_damaged: bool) -> Node:
    """Return an artifact without a readable manifest, by its newest attempt."""
    size = sum(store.sizes(Layout.artifact(job, key)).values())
    unnamed = {"job": job, "key": key, "stage": "?", "run": "?"}
    try:
        attempt = last_attempt(store, job, key)
    except StoreDamaged as error:
        warn(f"{error}; its artifact is kept")
        attempt, is_damaged = None, True
    if attempt is None:  # its first attempt is being written
        return Node(Garbage(**unnamed, bytes=size, is_finished=False), now(), (), is_damaged)
    alive = store.read(Layout.heartbeat(job, key, attempt.number))
    sign = None if alive is None else hashlib.sha256(alive).hexdigest()
    garbage = Garbage(**_names(attempt), bytes=size, is_finished=False, sign=sign)
    return Node(garbage, attempt.created, _keys(attempt.inputs), is_damaged)


def _names(record: object) -> dict[str, str]:
    return {name: getattr(record, name) for name in ("job", "key", "stage", "run")}


def _keys(inputs: Mapping[str, Iterable[InputRef]]) -> tuple[Artifact, ...]:
    return tuple((each.job, each.key) for references in inputs.values() for each in references)


def _edges(store: Store, graph: Graph, artifact: Artifact) -> Iterator[Artifact]:
    """Yield what an artifact needs: its inputs, its replacement, and what says which images weights have seen.

    The guard against leakage takes the lineage of imported weights from trainings with the same weights, or from the
    datasets that their contract names (`ray_jobs.evaluation.leakage`).
    """
    if artifact in graph.nodes:
        yield from graph.nodes[artifact].inputs
    if artifact in graph.replaced:
        yield graph.replaced[artifact]
    if (model := graph.imported.get(artifact)) is not None:
        for file in model.files:
            yield from graph.trained.get(file.sha256, ())
        try:
            contract = contract_of(store, model)
        except StoreDamaged as error:
            warn(f"{error}; the data that it was trained on is unknown")
            return
        yield from graph.datasets.get(contract.training_data, ()) if contract and contract.training_data else ()


def _roots(
    store: Store, graph: Graph, policy: Policy, closed: tuple[int, GcRecord] | None
) -> Iterator[tuple[Artifact, str]]:
    since = environment().utc() - timedelta(days=policy.keep_days)
    for name in alias_names(store):
        yield from ((artifact, ALIAS) for artifact in _of_alias(store, name))
    yield from ((artifact, RUN) for artifact in _of_runs(store, graph, policy.keep_runs, since))
    for artifact, node in graph.nodes.items():
        if node.is_damaged:
            yield artifact, DAMAGED
        elif datetime.fromisoformat(node.changed) >= since:
            yield artifact, NEW if node.garbage.is_finished else UNFINISHED
    if closed is not None:
        yield from _since_listed(store, graph, *closed)


def _since_listed(store: Store, graph: Graph, number: int, record: GcRecord) -> Iterator[tuple[Artifact, str]]:
    """Yield what is not listed, what runs have kept, and unfinished attempts that have shown life."""
    listed = _by_key(record)
    kept = {*store.names(f"{Layout.gc(number)}/keeps")}
    age = (environment().utc() - datetime.fromisoformat(record.time)).total_seconds()
    for artifact, node in graph.nodes.items():
        sign = node.garbage.sign
        if artifact not in listed or f"{artifact[0]}-{artifact[1]}.json" in kept:
            yield artifact, KEPT
        elif sign is not None and (age < SIGN_SECONDS or sign != listed[artifact].sign):
            yield artifact, UNFINISHED


def _by_key(record: GcRecord) -> dict[Artifact, Garbage]:
    return {(each.job, each.key): each for each in record.artifacts}


def _of_alias(store: Store, name: str) -> Iterator[Artifact]:
    """Yield the last targets of an alias, and the comparisons that decided for them."""
    for record in alias_history(store, name)[-ALIAS_DEPTH:]:
        if record.target is not None:
            yield record.target.job, record.target.key
        if record.report is not None:
            yield "promote", record.report


def _of_runs(store: Store, graph: Graph, keep_runs: int, since: datetime) -> Iterator[Artifact]:
    """Yield what recent runs used: the last ones of each recipe, those since a time, and all that may be under way.

    Also the newest result of each of their stages, and the models that the plans of unfinished runs name, because a run
    may continue from them (`init_from: latest`).
    """
    recipes: dict[str, list[str]] = defaultdict(list)
    for run in reversed(runs(store)):
        recipes[recipe_of(run)].append(run)
    recent: set[str] = set()
    for ids in recipes.values():
        wanted, found = set[str](), set[str]()
        for number, (run, stages) in enumerate(zip(ids, stage_keys(store, ids), strict=True)):
            is_recent = number < keep_runs or position_of(run) >= f"{since:%Y%m%d-%H%M%S}"
            if not is_recent and wanted <= found:
                break
            if is_recent:
                recent.add(run)
                wanted |= stages.keys()
                yield from filter(None, stages.values())
            for stage in wanted - found:
                made = stages.get(stage)
                if made in graph.nodes and graph.nodes[made].garbage.is_finished:
                    found.add(stage)
                    yield made
    unended = {run for run, over in store.versions("runs", ["over.json"], "events").items() if not over}
    for run in filter(is_run, unended):
        if run not in recent:
            events = read_events(store, run, newest=1)
            if not events or datetime.fromisoformat(events[0]["time"]) < since:
                continue
            (stages,) = stage_keys(store, [run])
            yield from filter(None, stages.values())
        latest = (plan_of(store, run) or {"latest": {}})["latest"]
        yield from ((model["job"], model["key"]) for model in latest.values() if model)


# ------------------------------------------------------------------------------------------------- deleting it


def _due(record: GcRecord) -> datetime:
    return datetime.fromisoformat(record.time) + timedelta(hours=record.grace_hours)


def _is_due(record: GcRecord) -> bool:
    return environment().utc() >= _due(record)


def _list(store: Store, unneeded: list[Garbage], grace_hours: float) -> tuple[int, GcRecord]:
    """Write a record and return it with its number; another gc's if that was faster."""
    # The newest first: what was made from an artifact is listed with it or before it.
    artifacts = tuple(unneeded[:LISTED])
    number = max(numbers(store, "gc"), default=0) + 1
    record = GcRecord(**_signed(), grace_hours=grace_hours, artifacts=artifacts)
    store.create(f"{Layout.gc(number)}.json", encode(record))
    opened = open_record(store)
    if opened is None:
        raise StoreError(f"{store.uri}: another `vitflow gc` has just deleted what this one found; run it again")
    return opened


def _delete(store: Store, policy: Policy, number: int, record: GcRecord) -> list[Garbage]:
    """Delete what a record lists and what is still not needed; return that."""
    store.create(f"{Layout.gc(number)}/closed.json", encode(_signed()))
    if (deletes := read_deletes(store, number)) is None:
        _, unneeded = _survey(store, policy, (number, record))
        mine = Deletes(**_signed(), artifacts=tuple((each.job, each.key) for each in unneeded))
        store.create(f"{Layout.gc(number)}/deletes.json", encode(mine))
        deletes = read_deletes(store, number)
        assert deletes is not None
    with environment().pool(DELETERS) as threads:
        list(threads.map(partial(_remove, store, f"gc {number}"), deletes.artifacts))
    store.create(f"{Layout.gc(number)}/over.json", encode(_signed()))
    listed = _by_key(record)
    return [listed[artifact] for artifact in deletes.artifacts]


def _remove(store: Store, by: str, artifact: Artifact) -> None:
    """Delete an artifact except its replaced.json, the manifest first."""
    retire(store, *artifact, by)
    manifest = Layout.manifest(*artifact)
    others = store.sizes(Layout.artifact(*artifact)).keys() - {manifest, Layout.replaced(*artifact)}
    store.remove([manifest, *sorted(others)])


def _signed() -> dict[str, str]:
    return {"time": now(), "who": who(), "nonce": environment().token_hex(8)}
