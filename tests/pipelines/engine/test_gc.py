"""gc deletes what nothing needs and nothing else, whatever runs, other gcs and deaths come between its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from random import Random
from typing import Any

import pytest

from pipelines.engine.gc import ALIAS, RUN, Collection, Policy, collect
from pipelines.engine.history import end_run
from pipelines.environment import environment, using
from pipelines.identity import sha256
from pipelines.results.verify import verify
from pipelines.store import (
    FileEntry,
    InputRef,
    Layout,
    StoreError,
    add_event,
    all_manifests,
    commit,
    create_attempt,
    create_run,
    input_ref,
    move_alias,
    open_record,
    read_manifest,
    replace_artifact,
)
from tests.simulation.cluster import Script
from tests.simulation.loop import Killed, Loop, Process
from tests.support.memory_store import MemoryStore
from tests.support.network import DiesAfter, Network
from tests.support.records import make_attempt, make_manifest, make_plan
from tests.support.world import World, pipeline

DAY = 86_400.0
POLICY = Policy(keep_runs=1, keep_days=30)
Artifact = tuple[str, str]


def reference(store: MemoryStore, job: str, key: str) -> InputRef:
    manifest = read_manifest(store, job, key)
    assert manifest is not None
    return input_ref(store, manifest)


def run_gc(store: MemoryStore, clock: Loop, grace: float | None = 24, policy: Policy = POLICY) -> Collection:
    with using(Process(clock, f"gc {policy.keep_runs}")):
        return collect(store, policy, grace)


def left(store: MemoryStore) -> set[Artifact]:
    """The artifacts of which more is left than the record of what replaced them."""
    names = [name.split("/") for name in store.objects if name.startswith("artifacts/")]
    return {(name[1], name[2]) for name in names if name[3:] != ["replaced.json"]}


def none_is_half(store: MemoryStore, before: dict[str, bytes]) -> bool:
    """Whether each artifact that is still committed has all its objects."""
    gone = {tuple(name.split("/")[1:3]) for name in before.keys() - store.objects.keys()}
    return all(Layout.manifest(*artifact) not in store.objects for artifact in gone)


# ------------------------------------------------------------------------------------------- random stores

ROWS = FileEntry(path="rows.parquet", size=4, sha256=sha256("rows"))
STAGES = {"data": ("ingest", ()), "model": ("pretrain", ("data",)), "probe": ("evaluate", ("data", "model"))}


@dataclass
class Past:
    """What a random store had before the gc: every fact that the rules are about."""

    store: MemoryStore = field(default_factory=MemoryStore)
    clock: Loop = field(default_factory=lambda: Loop(1e12))
    made: dict[Artifact, float] = field(default_factory=dict)  # the time, of unfinished ones, too
    finished: set[Artifact] = field(default_factory=set)
    leads_to: dict[Artifact, set[Artifact]] = field(default_factory=dict)
    runs: list[tuple[str, float, dict[str, Artifact], bool]] = field(default_factory=list)  # recipe, time, keys, ended
    named: set[Artifact] = field(default_factory=set)

    def make(self, job: str, key: str, inputs: Iterable[Artifact], run: str, random: Random) -> Artifact:
        artifact = (job, key)
        references = {each[0]: [reference(self.store, *each)] for each in inputs}
        common = {"key": key, "run": run, "stage": job, "inputs": references}
        create_attempt(self.store, make_attempt(job, **common))
        self.store.create(f"{Layout.files(job, key, 1)}/rows.parquet", b"rows")
        if random.random() < 0.85:
            commit(self.store, make_manifest(job, files=(ROWS,), **common))
            self.finished.add(artifact)
        elif random.random() < 0.5:
            self.store.create(Layout.heartbeat(job, key, 1), b"1")
        self.made[artifact], self.leads_to[artifact] = self.clock.now, {*inputs}
        return artifact

    def needed(self, policy: Policy) -> set[Artifact]:
        since = self.clock.now - policy.keep_days * DAY
        roots = {artifact for artifact, time in self.made.items() if time >= since} | self.named
        for recipe in {recipe for recipe, *_ in self.runs}:
            own = [run for run in reversed(self.runs) if run[0] == recipe]
            recent = [run for number, run in enumerate(own) if number < policy.keep_runs or run[1] >= since]
            roots |= {artifact for run in recent for artifact in run[2].values()}
            for stage in {stage for run in recent for stage in STAGES}:
                results = [run[2][stage] for run in own if run[2].get(stage) in self.finished]
                roots |= {*results[:1]}
        found: set[Artifact] = set()
        while roots:
            found |= roots
            roots = {other for each in roots for other in self.leads_to.get(each, ())} - found
        return found & self.made.keys()


def random_past(seed: int) -> Past:
    random, past = Random(seed), Past()
    with using(Process(past.clock)):
        for number in range(random.randint(3, 12)):
            past.clock.sleep(random.choice([0.1, 5, 40]) * DAY)
            recipe = random.choice("ab")
            run = f"{recipe}-{environment().utc():%Y%m%d-%H%M%S}-{number:04d}"
            create_run(past.store, run, make_plan(run, *STAGES, jobs={name: job for name, (job, _) in STAGES.items()}))
            keys: dict[str, Artifact] = {}
            for name, (job, inputs) in STAGES.items():
                if any(keys.get(each) not in past.finished for each in inputs):
                    break
                earlier = [artifact for artifact in past.finished if artifact[0] == job]
                if earlier and random.random() < 0.4:
                    keys[name] = random.choice(sorted(earlier))
                else:
                    keys[name] = past.make(job, f"{job}-{number}", [keys[each] for each in inputs], run, random)
                add_event(past.store, run, "stage", stage=name, status="RUNNING", key=keys[name][1])
            ended = random.random() < 0.7
            if ended:
                end_run(past.store, run, "SUCCEEDED")
            past.runs.append((recipe, past.clock.now, keys, ended))
            old = sorted(
                past.finished - {artifact for artifact in past.finished if past.leads_to.get(artifact) is None}
            )
            if old and random.random() < 0.3:
                job, key = random.choice(old)
                forced = past.make(job, f"{job}-{number}-forced", past.leads_to[job, key], run, random)
                if replace_artifact(past.store, job, key, forced[1], run, "--force"):
                    past.leads_to[job, key] = past.leads_to[job, key] | {forced}
            if old and random.random() < 0.3:
                target = random.choice(old)
                move_alias(past.store, f"alias{number}", reference(past.store, *target), 0, "person")
                past.named.add(target)
        past.clock.sleep(random.choice([2, 50]) * DAY)
    return past


@pytest.mark.parametrize("seed", range(25))
def test_what_is_deleted_is_exactly_what_nothing_needs(seed: int) -> None:
    past = random_past(seed)
    before = dict(past.store.objects)
    found = run_gc(past.store, past.clock, grace=None)
    assert past.store.objects == before, "a dry run changes nothing"
    unneeded = past.made.keys() - past.needed(POLICY)
    assert {(each.job, each.key) for each in found.unneeded} == unneeded
    run_gc(past.store, past.clock)
    past.clock.sleep(25 * 3600)
    needed = past.needed(POLICY)
    deleted = {(each.job, each.key) for each in run_gc(past.store, past.clock).deleted}
    assert deleted == unneeded
    assert needed <= left(past.store) == past.made.keys() - deleted
    kept = {name: data for name, data in before.items() if tuple(name.split("/")[1:3]) not in deleted}
    assert kept.items() <= past.store.objects.items()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_gc_that_is_killed_at_any_request_is_finished_by_the_next(seed: int) -> None:
    past = random_past(seed)
    run_gc(past.store, past.clock)
    past.clock.sleep(25 * 3600)
    listed = dict(past.store.objects)
    undisturbed = MemoryStore(dict(listed))
    run_gc(undisturbed, past.clock)
    for writes in range(1, 100):
        store = MemoryStore(dict(listed))
        dying = MemoryStore(store.objects, DiesAfter(writes))
        try:
            run_gc(dying, past.clock)
            break
        except Killed:
            assert not verify(store).damage
            assert none_is_half(store, listed)
        run_gc(store, past.clock)
        assert left(store) == left(undisturbed)
        assert open_record(store) is None
    else:
        pytest.fail("it never ended")


# ------------------------------------------------------------------------------------------- beside runs


class Between(Network):
    """Do something between two requests of a gc, once."""

    def __init__(self, request: int, do: Callable[[], Any]) -> None:
        super().__init__()
        self.left, self.do = request, do

    def before(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        self.left -= 1
        if self.left == 0:
            self.do()


@cache
def listed_long_ago() -> tuple[dict[str, bytes], float]:
    """The objects of a store, and the time: a record lists what the first of two runs made, and is due."""
    world = World("images", "pixels", "report", limit=1e12)
    world.driver(run="some-20261122-120000-0001").walk()
    world.pipeline = pipeline("other")
    world.driver(run="some-20261122-120000-0002").walk()
    world.clock.sleep(40 * DAY)
    world.driver(run=f"some-{Process(world.clock).utc():%Y%m%d-%H%M%S}-0003").walk()
    assert len(run_gc(world.store, world.clock).unneeded) == 3
    return world.store.objects, world.clock.now + 25 * 3600


def old_world() -> World:
    """A world that goes on from there, and whose next run needs what is listed."""
    world = World("images", "pixels", "report", limit=1e12)
    objects, world.clock.now = listed_long_ago()
    world.store.objects.update(objects)
    return world


def check_run(world: World, status: dict[str, Any]) -> None:
    """The run of `images`, `pixels` and `report` has made all, and all of it is there."""
    assert {each.value for each in status.values()} <= {"CACHED", "SUCCEEDED"}
    stages = {each.stage: each for each in all_manifests(world.store)}
    assert {"images", "pixels", "report"} <= stages.keys()
    inputs = [each for name in status for references in stages[name].inputs.values() for each in references]
    assert all(read_manifest(world.store, each.job, each.key) for each in inputs)
    assert not verify(world.store).damage


def drive(world: World) -> None:
    run = f"some-{Process(world.clock).utc():%Y%m%d-%H%M%S}-0004"
    check_run(world, world.driver(run=run).walk()[0])


OTHERS = {
    "a run": drive,
    "a gc": lambda world: run_gc(world.store, world.clock, policy=Policy(keep_runs=2)),
    "a gc that keeps all": lambda world: run_gc(world.store, world.clock, policy=Policy(keep_runs=99)),
}


def test_a_run_that_plans_what_is_listed_keeps_it() -> None:
    world = old_world()
    drive(world)
    assert world.told.of("images")[-1].startswith("CACHED")
    found = run_gc(world.store, world.clock)
    assert found.deleted == ()
    assert len(left(world.store)) == 4


def test_what_was_deleted_is_made_again_under_another_key() -> None:
    world = old_world()
    keys = {each.key for each in all_manifests(world.store)}
    assert len(run_gc(world.store, world.clock).deleted) == 3
    drive(world)
    assert world.told.of("images")[-1].startswith("SUCCEEDED")
    assert len({each.key for each in all_manifests(world.store)} & keys) == 1
    drive(world)
    assert world.told.of("report")[-1].startswith("CACHED")


@pytest.mark.slow
@pytest.mark.parametrize(
    "others", ["a run", "a gc", "a gc, then a run", "a run, then a gc", "a gc that keeps all, then a run"]
)
def test_whatever_comes_between_two_requests_of_a_gc_no_input_vanishes_under_a_stage(others: str) -> None:
    for request in range(1, 300):
        world = old_world()
        came = []

        def others_do(world: World = world, came: list[str] = came) -> None:
            for other in others.split(", then "):
                came.append(other)
                OTHERS[other](world)

        run_gc(MemoryStore(world.store.objects, Between(request, others_do)), world.clock)
        if not came:
            break
        if "a run" in others:
            drive(world)
            assert world.told.of("report")[-1].startswith("CACHED"), request
        else:
            assert left(world.store) == {("ingest", manifest.key) for manifest in all_manifests(world.store, "ingest")}
        run_gc(world.store, world.clock)
        assert "gc/1/over.json" in world.store.objects
    assert request > 20


def test_an_input_that_somebody_removed_is_made_again_by_the_driver() -> None:
    world = World("images", "pixels")

    def remove(attempt: Any) -> Script:
        if attempt.job != "baselines" or attempt.number > 1:
            return Script()
        world.clock.after(0.5, lambda: world.store.remove([name for name in world.store.objects if "/ingest/" in name]))
        return Script.failed(3, "error: input data: not found\n")

    world.cluster.script = remove
    status, _ = world.driver().walk()
    assert {name: each.value for name, each in status.items()} == {"images": "SUCCEEDED", "pixels": "SUCCEEDED"}
    assert len(world.manifests()) == 2


# ------------------------------------------------------------------------------------------- single rules


def unneeded_model(world: World) -> InputRef:
    (old,) = all_manifests(world.store, "baselines")
    return reference(world.store, old.job, old.key)


def test_an_alias_keeps_what_it_names_and_where_that_came_from() -> None:
    world = old_world()
    with using(Process(world.clock)):
        move_alias(world.store, "production", unneeded_model(world), 0, "person")
    found = run_gc(world.store, world.clock)
    assert [each.stage for each in found.deleted] == ["report"]
    assert [each.stage for each in found.kept[ALIAS]] == ["pixels"]


def test_an_alias_cannot_name_what_is_being_deleted() -> None:
    world = old_world()
    target = unneeded_model(world)
    with pytest.raises(Killed):  # it has decided, and deleted nothing yet
        run_gc(MemoryStore(world.store.objects, DiesAfter(2)), world.clock)
    with using(Process(world.clock)), pytest.raises(StoreError, match="is being deleted by `vitflow gc`"):
        move_alias(world.store, "production", target, 0, "person")


def test_an_attempt_that_shows_life_is_kept_however_old_it_is() -> None:
    world = old_world()
    key = "f" * 64
    with using(Process(world.clock)):
        data = unneeded_model(world)
        old = {"created": (Process(world.clock).utc() - timedelta(days=90)).isoformat(), "inputs": {"data": [data]}}
        create_attempt(world.store, make_attempt("pretrain", key=key, **old))
    beat = Layout.heartbeat("pretrain", key, 1)
    world.store.replace(beat, b"1")
    run_gc(world.store, world.clock)  # deletes what was listed without it, and lists it
    assert ("pretrain", key) in left(world.store)
    world.clock.sleep(25 * 3600)
    world.store.replace(beat, b"2")
    found = run_gc(world.store, world.clock)
    assert found.deleted == ()
    world.clock.sleep(25 * 3600)
    assert key in {each.key for each in run_gc(world.store, world.clock).deleted}


def test_an_unfinished_run_keeps_the_model_that_its_plan_starts_from() -> None:
    world = old_world()
    run = "another-20260101-000000-0000"
    with using(Process(world.clock)):
        latest = unneeded_model(world)
        create_run(world.store, run, make_plan(run, "model") | {"latest": {"model": latest.model_dump()}})
    assert [each.stage for each in run_gc(world.store, world.clock).kept[RUN] if each.key == latest.key] == ["pixels"]


def test_imported_weights_keep_the_training_that_made_them() -> None:
    """The guard against leakage looks there for the images that they have seen."""
    store, clock = MemoryStore(), Loop(1e12)
    weights = ({"path": "model.safetensors", "size": 1, "sha256": "a" * 64},)
    with using(Process(clock)):
        data = commit(store, make_manifest("ingest", key="data"))
        of = {"data": [input_ref(store, data)]}
        commit(store, make_manifest("pretrain", key="model", files=weights, inputs=of))
        commit(store, make_manifest("pretrain", key="another"))
        clock.sleep(90 * DAY)
        commit(store, make_manifest("import", key="copy", files=weights))
    assert [each.key for each in run_gc(store, clock, grace=None).unneeded] == ["another"]


def test_a_damaged_record_of_an_alias_stops_a_gc() -> None:
    world = old_world()
    world.store.create("aliases/production/1.json", b"{")
    with pytest.raises(StoreError, match=r"aliases/production/1\.json is damaged"):
        run_gc(world.store, world.clock)
