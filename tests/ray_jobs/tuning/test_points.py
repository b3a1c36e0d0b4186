"""Searches of a fine-tuning: the points that they try, and that an interrupted search repeats no trial."""

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from pydantic import ValidationError

from pipelines.spec import Finetune, Labels
from pipelines.spec.search import Point
from pipelines.store import FitName
from ray_jobs import finetune
from ray_jobs.training.task import make_task
from ray_jobs.tuning import runner
from ray_jobs.tuning.ledger import add_point, add_trial, open_ledger
from ray_jobs.tuning.points import points, propose, size
from ray_jobs.tuning.progress import ended, progress, time_left
from ray_jobs.tuning.trial import Trial
from tests.simulation.loop import Killed
from tests.support.finetuning import attempt, configuration, context, put_halves, trial
from tests.support.records import flip

RATES = {"low": 1e-4, "high": 1e-1, "scale": "log"}
OVER: dict[str, Any] = {
    "learning_rate": RATES,
    "optimizer.weight_decay": [0.0, 0.1],
    "steps": {"low": 30, "high": 46},
}


def searching(kind: str, **fields: object) -> Finetune:
    """A fine-tuning with all labels that is searched over OVER."""
    search = {"kind": kind, "over": OVER, "trials": 4} | fields
    return configuration(learning_rates=(), labels=Labels(), steps=60, search=search)


def test_a_grid_is_every_combination_and_the_learning_rates():
    over = {"steps": [4, 8], "mixup": [0.0, 0.2]}
    config = configuration(learning_rates=(1e-3, 1e-2), search={"kind": "grid", "over": over})
    found = points(config)
    assert len(found) == 8
    assert found[1] == {"learning_rate": 1e-3, "steps": 4, "mixup": 0.2}
    made = [config.at(point) for point in found]
    assert {(each.learning_rates, each.steps, each.mixup) for each in made} == {
        ((rate,), steps, mixup) for rate in (1e-3, 1e-2) for steps in (4, 8) for mixup in (0.0, 0.2)
    }
    assert all(each.search is None and each.batch_size == config.batch_size for each in made)


def test_random_points_fill_their_ranges_evenly_and_stay_when_trials_are_added():
    found = points(searching("random", trials=600))
    rates = np.array([point["learning_rate"] for point in found])
    steps = Counter(point["steps"] for point in found)
    decays = Counter(point["optimizer.weight_decay"] for point in found)
    assert rates.min() >= 1e-4 and rates.max() <= 1e-1
    quarters, _ = np.histogram(np.log10(rates), 4, (-4, -1))
    assert quarters.min() > 110, "evenly in the logarithm: 150 each, with a deviation of 11"
    assert set(steps) == set(range(30, 47)) and min(steps.values()) > 12, "35 each, with a deviation of 6"
    assert set(decays) == {0.0, 0.1} and min(decays.values()) > 250
    assert found[:3] == points(searching("random", trials=3))
    assert found[0] != points(searching("random", seed=1))[0]


def test_a_small_space_is_tried_once():
    over = {"learning_rate": [1e-3, 1e-2], "mixup": [0.0, 0.2]}
    grid = configuration(learning_rates=(), search={"kind": "grid", "over": over})
    drawn = points(searching("random", over=over, trials=50))
    assert sorted(map(str, drawn)) == sorted(map(str, points(grid)))


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"over": {"learning_rate": [0.0]}}, "search.over.learning_rate\n  value 0.0: .* greater than 0"),
        ({"over": {**OVER, "seed": [0, 1]}}, "search.over.seed\n  all trials share seed"),
        ({"over": {**OVER, "threads": [1, 2]}}, "search.over.threads\n  all trials share threads"),
        ({"over": {**OVER, "optimizer.decay_rate": [1]}}, "search.over.`optimizer.decay_rate`\n  value 1"),
        (
            {"over": {**OVER, "optimizer.preset": ["mae"]}},
            "`optimizer.preset`\n  all trials share optimizer.preset",
        ),
        (
            {"over": {**OVER, "batch_size": {"low": 10.0, "high": 20.0}}},
            "batch_size\n  value 13.1.* valid integer",
        ),
        (
            {"over": {"learning_rate": ["1e-3", 0.01]}},
            "learning_rate.*\n  .*'1e-3' is text; write the number without",
        ),
        (
            {"over": {**OVER, "optimizer.betas": [[0.9, "0.95"]]}},
            "'0.95' is text; write the number without quotes",
        ),
        (
            {"over": {**OVER, "randaugment": [{"magnitude": 9}, {"magnitude": 9.0, "layers": 2}]}},
            "search.over.randaugment\n  duplicate value {'magnitude': 9.0, 'layers': 2}",
        ),
        ({"over": {**OVER, "mixup.alpha": [1]}}, "mixup is 0.0, which has no field alpha"),
        ({"over": {"steps": [4, 8]}}, "give either learning_rates or search.over.learning_rate"),
        ({"over": {**OVER, "steps": {"low": 9, "high": 4}}}, "low 9 is not less than high 4"),
        (
            {"over": {**OVER, "mixup": {"low": 0, "high": 1, "scale": "log"}}},
            "a logarithmic range begins above 0",
        ),
        ({"kind": "asha", "grace": 9}, "grace 9 must be less than evaluations 9"),
        ({"kind": "asha", "evaluations": 70}, "search.evaluations 70 is more than steps 60"),
    ],
)
def test_a_search_that_cannot_be_is_refused_with_its_field(search, message):
    with pytest.raises(ValidationError, match=message):
        base = {"learning_rates": (), "labels": Labels(), "steps": 60}
        configuration(**base, search={"kind": "random", "over": OVER, "trials": 4} | search)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_halves(tmp_path_factory.mktemp("dataset"))


class Entries:
    """A ledger with these trials, by the numbers of point and fold."""

    def __init__(self, ended: dict[tuple[int, int], Trial]) -> None:
        self.ended = ended

    def trial(self, fit: FitName) -> tuple[int, Trial] | None:
        found = self.ended.get((fit.number, fit.part))
        return found and (1, found)


def test_where_a_search_stands_is_said_while_it_runs():
    search = {"kind": "grid", "over": {"steps": [30, 40]}}
    config = configuration(labels=Labels(), learning_rates=(0.01, 0.1), search=search)
    ended: dict[tuple[int, int], Trial] = {}

    def said(folds: int = 1) -> str:
        return progress(config, Entries(ended), folds)

    assert said() == "0 of 4 trials have ended"
    ended |= {(0, 0): trial(0.5, 1.0, 30), (3, 0): trial(0.75, 1.0, 40)}
    assert said() == "2 of 4 trials have ended; the best is trial 3, accuracy 0.750: learning rate 0.1, steps 40"
    ended[3, 0] = trial(0.75, 1.0, 40, is_pruned=True)
    assert said().startswith("2 of 4 trials have ended; the best is trial 0, accuracy 0.500")
    ended[0, 1] = trial(0.25, 1.0, 30)
    assert said(folds=2).startswith("3 of 8 trials have ended; the best is trial 0, accuracy 0.375")


def test_a_search_says_how_long_it_still_takes_and_its_trials_after_each_quarter():
    config = searching("asha", trials=8)
    ended: dict[tuple[int, int], Trial] = {}

    def said(deadline: float = math.inf) -> list[str]:
        return progress(config, Entries(ended), 1, concurrent=2, deadline=deadline).splitlines()

    steps = [config.at(point).steps for point in points(config)]
    ended[0, 0] = trial(0.5, 1.0, steps[0], seconds=60)
    # a trial that ended after half of its steps would have taken twice the time
    ended[1, 0] = trial(0.25, 1.0, steps[1] // 2, is_pruned=True, seconds=120 * (steps[1] // 2) / steps[1])
    first, *table = said()
    assert first.startswith("2 of 8 trials have ended, at most 0:04:30 left; the best is trial 0, accuracy 0.500")
    assert [line.split(":")[0] for line in table] == ["  0.500  trial 0", "  0.250  trial 1"]
    assert "(ended at step" in table[1]
    ended[2, 0] = trial(0.75, 1.0, steps[2], seconds=60)
    assert len(said()) == 1, "the next table comes after the second quarter"
    assert "at most 0:01:00 left of search.minutes" in said(time.time() + 60.2)[0]
    assert time_left(90, math.inf, is_limit=False) == "0:01:30 left"


def test_a_sweep_of_rates_says_how_many_trials_of_all_folds_have_ended():
    config = configuration(learning_rates=(0.01, 0.1, 1.0))
    ended = {(number, 0): trial(0.5, 1.0, config.steps, seconds=50) for number in range(3)}
    assert progress(config, Entries(ended), folds=5) == "3 of 15 trials have ended, 0:10:00 left"
    ended[2, 1] = trial(0.5, 1.0, config.steps, seconds=90)
    assert progress(config, Entries(ended), folds=2).startswith("4 of 6 trials have ended, 0:02:00 left; the best")


FOUR: dict[str, Any] = {"learning_rate": [1e-3, 1e-2], "mixup": [0.0, 0.2]}
SIXTY: dict[str, Any] = {
    "learning_rate": [1e-4, 1e-3, 1e-2, 1e-1],
    "mixup": [0.0, 0.1, 0.2],
    "steps": {"low": 30, "high": 34},
}


def accuracy(point: Point) -> float:
    """Of a trial: a pure function of its point, with one best place."""
    rest = sum(float(value) for path, value in point.items() if path not in ("learning_rate", "steps"))
    return 1 / (1 + abs(math.log10(point["learning_rate"]) + 2) + rest + abs(point.get("steps", 32) - 32) / 9)


class Cluster:
    """Ray's tasks, in this process: one that is waited for ends, a random one of those that run."""

    def __init__(self, patch: pytest.MonkeyPatch, store: Path) -> None:
        self.store, self.concurrent, self.trained = store, 1, list[Point]()
        self.last: int | None = None  # the trial that is killed
        self._tasks: dict[object, Callable[[], Any]] = {}
        self._random = np.random.default_rng(0)
        patch.setattr(ray, "remote", lambda **_: lambda run: SimpleNamespace(remote=partial(self._begin, run)))
        patch.setattr(ray, "wait", self._wait)
        patch.setattr(ray, "get", lambda task: self._tasks.pop(task)())
        patch.setattr("ray_jobs.process.cluster.fit_resources", lambda *_: ({"CPU": 1}, self.concurrent))
        patch.setattr(runner, "run_trial", self._train)

    def _begin(self, run: Callable[..., Any], *arguments: Any) -> object:
        task = object()
        self._tasks[task] = partial(run, *arguments)
        assert len(self._tasks) <= self.concurrent
        return task

    def _wait(self, tasks: list[object]) -> tuple[list[object], list[object]]:
        ends = tasks[self._random.integers(len(tasks))]
        return [ends], [task for task in tasks if task is not ends]

    def _train(self, given: Any, task: Any, pool: Any, folds: Any, fold: int) -> Trial:
        if len(self.trained) == self.last:
            raise Killed
        self.trained.append(task.point)
        result = trial(accuracy(task.point), 1.0, task.config.steps)
        add_trial(given, task.trial(fold), result)
        return result

    def search(self, config: Finetune, number: int = 1) -> dict[int, Point]:
        """The points of an attempt, whose trials all have the results of their points."""
        self._tasks.clear()
        given = attempt(self.store, config, number)
        pools, supports = finetune.labelled(config, given.dataset())
        ledger = open_ledger(given)
        task = make_task(config, given.dataset(), None)._replace(attempts=ledger.attempts)
        found = runner.run_proposed(given, task, pools, supports.folds, ledger)
        done = ended(config, ledger, found, len(supports.folds))
        assert {point.number: point.accuracy for point in done} == {
            number: accuracy(point) for number, point in found.items()
        }
        return found


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, dataset: Path, tmp_path: Path) -> Cluster:
    context(tmp_path / "store", dataset, searching("optuna"))
    return Cluster(monkeypatch, tmp_path / "store")


@pytest.mark.parametrize("concurrent", [1, 3])
@pytest.mark.parametrize(
    ("over", "trials", "tried"),
    [(FOUR, 12, 4), (SIXTY, 30, 30), (SIXTY, 60, 60), (OVER, 20, 20)],
    ids=["4", "half of 60", "60", "mixed"],
)
def test_optuna_tries_no_point_twice(over, trials, tried, concurrent, cluster, capsys):
    cluster.concurrent = concurrent
    config = searching("optuna", over=over, trials=trials)
    found = cluster.search(config)
    assert list(found) == list(range(tried))
    assert len(cluster.trained) == tried
    assert sorted(map(str, cluster.trained)) == sorted(map(str, found.values()))
    assert all(found[number] not in list(found.values())[:number] for number in found)
    assert all(config.at(point) for point in found.values()), "in the space"
    said = capsys.readouterr().out.splitlines()
    assert sum(f"of {tried} trials have ended" in line for line in said) == tried
    assert said.count("search.trials is 12, but the space has only 4 points") == (over is FOUR)


def test_optuna_proposes_better_points_than_chance():
    """The mean accuracy of the proposals after the first ten, which are random."""
    config = searching("optuna", over=OVER, trials=40)
    tried: list[tuple[Point, float | None]] = []
    for _ in range(40):
        point = propose(config, tried)
        assert point is not None
        tried.append((point, accuracy(point)))
    proposed, by_chance = tried[10:], points(searching("random", trials=500))
    assert np.mean([each[1] for each in proposed]) > np.mean([*map(accuracy, by_chance)]) + 0.1
    assert propose(config, []) != propose(searching("optuna", over=OVER, seed=1), [])


def test_optuna_knows_how_many_points_there_are_and_when_it_repeats_them():
    assert [size(searching("optuna", over=over)) for over in (FOUR, SIXTY, OVER)] == [4, 60, math.inf]
    config = searching("optuna", over=FOUR)
    every = points(searching("random", over=FOUR, trials=50))
    assert propose(config, [(point, accuracy(point)) for point in every]) is None
    assert propose(config, [(point, None) for point in every]) is None, "also while they run"
    assert propose(config, [(point, accuracy(point)) for point in every[1:]]) == every[0]


def test_a_search_that_ends_early_says_so(cluster, monkeypatch, capsys):
    one = {"learning_rate": 1e-2, "mixup": 0.1, "steps": 32}
    monkeypatch.setattr(runner, "propose", lambda config, tried: None if tried else one)
    assert cluster.search(searching("optuna", over=SIXTY, trials=30)) == {0: one}
    assert capsys.readouterr().out.splitlines()[-1].startswith("the search ends after 1 of 30 points")


def test_optuna_begins_nothing_after_its_minutes(cluster, capsys):
    assert cluster.search(searching("optuna", minutes=1e-9)) == {}
    assert not cluster.trained and "the search ends" not in capsys.readouterr().out


@pytest.mark.parametrize("ends", [[0], [7], [15, 2, 9], [29]], ids=str)
def test_optuna_proposes_alike_after_interruptions(ends, cluster, dataset, tmp_path, monkeypatch):
    """It is killed in a trial after so many others: the point that it was at comes first, and then the same ones."""
    config = searching("optuna", over=SIXTY, trials=30)
    undisturbed = cluster.search(config)
    context(tmp_path / "killed", dataset, config)
    killed = Cluster(monkeypatch, tmp_path / "killed")
    for number, more in enumerate(ends, 1):
        killed.last = len(killed.trained) + more
        with pytest.raises(Killed):
            killed.search(config, number)
    killed.last = None
    assert killed.search(config, len(ends) + 1) == undisturbed
    assert killed.trained == list(undisturbed.values()), "no trial was repeated"


def test_optuna_begins_what_it_was_killed_in_first(cluster):
    """With several trials at once, none of which is repeated or lost."""
    config, cluster.concurrent = searching("optuna", over=SIXTY, trials=30), 3
    for number in itertools.count(1):
        cluster.last = len(cluster.trained) + 4
        with suppress(Killed):
            found = cluster.search(config, number)
            break
    assert list(found) == list(range(30))
    assert sorted(map(str, cluster.trained)) == sorted(map(str, found.values()))
    assert len({*map(str, cluster.trained)}) == 30


def test_a_result_stays_with_its_point_if_the_points_entry_is_lost(cluster, tmp_path):
    """Optuna may give the number to another point; `Cluster.search` checks that each has its own result."""
    config = searching("optuna", over=OVER, trials=20)
    before = cluster.search(config)
    flip(folder(tmp_path, 1) / "point-3.json")
    after = cluster.search(config, 2)
    assert after == before | {3: after[3]} and after[3] != before[3]
    assert list(after) == list(range(20)), "as sweep.json has them"
    assert cluster.trained == [*before.values(), after[3]]


def test_the_newest_attempts_points_are_those_of_a_search(cluster, tmp_path):
    """An older attempt that still lives goes on with other numbers and points."""
    config = searching("optuna", over=OVER, trials=8)
    cluster.last = 5
    with pytest.raises(Killed):
        cluster.search(config)
    other = {"learning_rate": 0.05, "optimizer.weight_decay": 0.1, "steps": 44}
    cluster.last = None
    found = cluster.search(config, 2)
    first = attempt(cluster.store, config, 1)
    assert add_point(first, 6, other)
    add_trial(first, FitName("trial", 6, 0), trial(0.9, 1.0, 44))
    assert cluster.search(config, 2) == found
    assert len(cluster.trained) == 8


@pytest.mark.ray
@pytest.mark.slow
def test_a_search_that_goes_on_repeats_no_trial(dataset, tmp_path, local_ray, capsys):
    """Attempt 1 leaves two of its trials unfinished; attempt 2 does these and no other."""
    config = searching("asha", trials=6)
    context(tmp_path / "store", dataset, config)
    finetune.main(attempt(tmp_path / "store", config, 1))
    before = ledger(tmp_path, 1)
    trials = sorted(name for name in before if name.startswith("trial-"))
    assert len(trials) == 6
    lost = trials[1], trials[4]
    for name in (*lost, "refit-0.json"):
        (folder(tmp_path, 1) / name).unlink()
    capsys.readouterr()
    result = finetune.main(attempt(tmp_path / "store", config, 2))
    after = ledger(tmp_path, 2)
    assert {name for name in after if name.startswith("trial-")} == set(lost)
    assert capsys.readouterr().out.count("(from attempt 1)") == 4
    files = folder(tmp_path, 2).parent / "files"
    sweep = json.loads((files / "sweep.json").read_text())
    assert [trial["number"] for trial in sweep["trials"]] == list(range(6))
    assert sweep["chosen_trial"] == result.metrics["trial"]
    whole = [trial for trial in sweep["trials"] if "pruned_at" not in trial]
    best = max(whole, key=lambda trial: (trial["accuracies"], -trial["losses"][0]))
    assert sweep["chosen_point"] == best["point"] == sweep["trials"][best["number"]]["point"]
    assert result.metrics["validation_accuracy"] == best["accuracies"][0]
    assert 1 <= len(whole) < 6, "some were ended early"


def folder(root: Path, number: int) -> Path:
    return next((root / "store").glob(f"artifacts/finetune/*/attempts/{number}/ledger"))


def ledger(root: Path, number: int) -> dict[str, Any]:
    """An attempt's entries by name."""
    return {path.name: json.loads(path.read_text()) for path in folder(root, number).glob("*.json")}
