"""A comparison moves an alias once, and only if the alias has not moved since it was planned."""

from collections.abc import Callable
from contextlib import suppress

import pytest

from pipelines.engine.plan import plan_pipeline
from pipelines.engine.promotion import is_unsettled
from pipelines.engine.runs import run_status
from pipelines.recipe.load import parse_pipeline
from pipelines.store import Alias, Attempt, InputRef, alias_history, input_ref, move_alias, read_over
from tests.simulation.cluster import Script
from tests.simulation.loop import Killed
from tests.support.network import DiesAfter, Loses
from tests.support.records import make_manifest
from tests.support.world import DIGITS, World

TRAIN = {"job": "pretrain", "data": "images", "model": "Ti/16", "resolution": 224, "init_from": "@production"}
TRAIN |= {"steps": 20, "batch_size": 12, "learning_rate": 1e-3}
PROMOTE = {"job": "promote", "data": "images", "candidate": "train", "against": "@production", "floor": 0.5}
OTHER = InputRef(job="pretrain", key="other", content_digest="other", manifest_sha256="0" * 64)


def world(verdict: Callable[[Attempt], str] = lambda attempt: "promoted") -> World:
    """A world in which comparisons end with this verdict."""

    def script(attempt: Attempt) -> Script:
        decided = {"verdict": verdict(attempt), "reason": "so it is"} if attempt.job == "promote" else {}
        return Script(metrics=decided)

    made = World("images", script=script)
    stages = {"images": DIGITS, "train": TRAIN, "promote": PROMOTE}
    made.pipeline = parse_pipeline({"name": "some", "stages": stages}, "test")
    return made


def with_steps(world: World, steps: int) -> None:
    """From now on, another training."""
    stages = {"images": DIGITS, "train": TRAIN | {"steps": steps}, "promote": PROMOTE}
    world.pipeline = parse_pipeline({"name": "some", "stages": stages}, "test")


def moves(world: World) -> list[Alias]:
    return alias_history(world.store, "production")


def put_other(world: World) -> None:
    """Commit a model that a person may choose."""
    name = f"artifacts/{OTHER.job}/{OTHER.key}/manifest.json"
    made = make_manifest(
        "pretrain", key="other", content_digest="other", stage="other", run="other-20260101-000000-0000"
    )
    world.store.objects[name] = made.model_dump_json().encode()


def test_each_better_model_becomes_the_next_start_and_a_refused_one_does_not() -> None:
    verdicts = iter(["promoted", "worse", "promoted"])
    made = world(lambda attempt: next(verdicts))
    trained = []
    for steps in (10, 11, 12):
        with_steps(made, steps)
        made.driver(run=made.new_run()).walk()
        trained.append(made.manifests()["train"])
    assert [[start.key for start in each.inputs.get("init_from", [])] for each in trained] == [
        [],
        [trained[0].key],
        [trained[0].key],
    ]
    assert [move.target and move.target.key for move in moves(made)] == [trained[0].key, trained[2].key]
    assert {move.why for move in moves(made)} == {"rule"}
    assert moves(made)[1].report == made.manifests()["promote"].key
    assert "@production: refused, worse: so it is" in [text.partition(" ")[2] for text in made.told.of("promote")]


def test_a_comparison_from_the_cache_moves_nothing() -> None:
    made = world()
    for steps in (10, 11):
        with_steps(made, steps)
        made.driver(run=made.new_run()).walk()
    first, second = moves(made)
    move_alias(made.store, "production", first.target, 2, "rollback")
    run = made.new_run()
    status, stages = made.driver(run=run).walk()
    assert status == {"images": "CACHED", "train": "CACHED", "promote": "CACHED"}
    assert stages[-1].manifest is not None and stages[-1].manifest.key == second.report
    assert [move.why for move in moves(made)] == ["rule", "rule", "rollback"]
    assert made.told.of("promote")[-1].endswith("@production does not move again)")
    (promotion,) = [stage["promotion"] for stage in run_status(made.store, run)["stages"] if "promotion" in stage]
    decided = {"alias": "production", "verdict": "promoted", "reason": "so it is"}
    assert promotion == decided | {"by": made.manifests()["promote"].run}


@pytest.mark.parametrize("lost", ["aliases/production", "pretrain/other/manifest.json", "nothing"])
def test_an_alias_that_a_person_moved_meanwhile_is_compared_with_once_more(lost: str) -> None:
    """Also if a request about its new model gets lost: a comparison with another model must not move it."""
    made, seen, network = world(), [], Loses(lost, times=0)

    def verdict(attempt: Attempt) -> str:
        seen.append([reference.key for reference in attempt.inputs.get("against", [])])
        if len(seen) == 1:
            put_other(made)
            move_alias(made.store, "production", OTHER, 0, "person")
            network.times = 2
        return "promoted"

    made.cluster.script = lambda attempt: Script(
        metrics={"verdict": verdict(attempt), "reason": "so it is"} if attempt.job == "promote" else {}
    )
    status, stages = made.driver(network).walk()
    assert status["promote"] == "SUCCEEDED"
    assert seen == [[], ["other"]]
    person, rule = moves(made)
    assert (rule.why, rule.expected, rule.report) == ("rule", person.number, stages[-1].key)


def test_an_alias_that_moves_again_and_again_is_left_to_the_others() -> None:
    made, number = world(), iter(range(9))

    def script(attempt: Attempt) -> Script:
        if attempt.job != "promote":
            return Script()
        put_other(made)
        last = next(number)
        move_alias(made.store, "production", None if last % 2 else OTHER, last, "person")
        return Script(metrics={"verdict": "promoted", "reason": "so it is"})

    made.cluster.script = script
    status, _ = made.driver().walk()
    assert status["promote"] == "FAILED"
    assert [move.why for move in moves(made)] == ["person", "person"]


@pytest.mark.parametrize("conflict", [False, True])
def test_a_driver_killed_anywhere_leaves_one_move_to_the_next(conflict: bool) -> None:
    """Whatever its last write was; also if the alias was moved meanwhile, and rolled back after the move."""
    for writes in range(1, 60):
        made = world()
        if conflict:
            put_other(made)

            def script(attempt: Attempt, made: World = made) -> Script:
                if attempt.job == "promote" and not moves(made):
                    move_alias(made.store, "production", OTHER, 0, "person")
                return Script(metrics={"verdict": "promoted", "reason": "so it is"} if attempt.job == "promote" else {})

            made.cluster.script = script
        with suppress(Killed):
            made.driver(DiesAfter(writes)).walk()
        rules = [move for move in moves(made) if move.why == "rule"]
        put_other(made)
        if rules:  # a person goes back before the next driver begins
            move_alias(made.store, "production", OTHER, rules[0].number, "rollback")
        finished_before = read_over(made.store, "some-20261122-120000-0000") is not None
        status, stages = made.driver().walk()
        assert status["promote"] in {"SUCCEEDED", "CACHED"}
        (rule,) = [move for move in moves(made) if move.why == "rule"]
        assert rule.expected == int(conflict) and rule.report == stages[-1].key
        assert rule.target == input_ref(made.store, made.manifests()["train"])
        assert moves(made)[-1].why == ("rollback" if rules else "rule"), "what a person undid stays undone"
        if finished_before:
            break
    else:
        pytest.fail("the walk does not end")


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_comparison_whose_driver_died_before_the_move_moves_the_alias_with_the_next(is_given_up: bool) -> None:
    """Also if that run is given up: the next one finds the comparison, and moves the alias, once."""
    made = world()
    for writes in range(1, 60):
        made = world()
        with suppress(Killed):
            made.driver(DiesAfter(writes)).walk()
        if "promote" in made.manifests() and not moves(made):
            break
    run = made.new_run() if is_given_up else None
    stages = plan_pipeline(made.store, made.pipeline, tuple(made.pipeline.stages))
    assert {stage.state for stage in stages} == {"cached"} and is_unsettled(made.store, stages[-1])
    made.driver(run=run).walk()
    (move,) = moves(made)
    assert move.report == stages[-1].key and not is_unsettled(made.store, stages[-1])
    assert (move.run == made.manifests()["promote"].run) != is_given_up
