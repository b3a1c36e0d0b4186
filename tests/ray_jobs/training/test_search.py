"""Searches of a fine-tuning: the points that they try, and that an interrupted search repeats no trial."""

import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipelines.spec import Finetune, Labels
from ray_jobs import finetune
from ray_jobs.training.search import Tried, points, proposer
from ray_jobs.training.standing import standing, time_left
from ray_jobs.training.task import Trial
from tests.support.finetuning import attempt, configuration, context, put_halves

RATES = {"low": 1e-4, "high": 1e-1, "scale": "log"}
OVER: dict[str, Any] = {
    "learning_rate": RATES,
    "optimizer.weight_decay": [0.0, 0.1],
    "steps": {"low": 30, "high": 46},
}

PBT = {"kind": "pbt", "over": {"learning_rate": RATES}}


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
    config = searching("random", over={"learning_rate": [1e-3, 1e-2], "mixup": [0.0, 0.2]}, trials=50)
    assert sorted(map(str, points(config))) == sorted(
        map(
            str,
            points(
                configuration(
                    learning_rates=(),
                    search={"kind": "grid", "over": {"learning_rate": [1e-3, 1e-2], "mixup": [0.0, 0.2]}},
                )
            ),
        )
    )


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
        (
            PBT | {"over": {"optimizer.layer_decay": [0.5, 1.0]}},
            "over.optimizer.layer_decay: kind pbt changes values during a training, which optimizer.layer_decay does"
            " not allow; it can search learning_rate, optimizer.weight_decay, randaugment",
        ),
        (PBT | {"over": {"steps": [4, 8]}}, "over.steps: kind pbt changes values during a training"),
        (PBT | {"rounds": 61}, "search.rounds 61 is more than steps 60"),
        (
            PBT | {"over": {"randaugment": [None], "randaugment.layers": [1]}},
            "give either randaugment or its fields",
        ),
        (PBT | {"quantile": 0.6}, "quantile\n.*less than or equal to 0.5"),
        (PBT | {"factors": [1.2, 0.8]}, "factors.0\n.*less than 1"),
    ],
)
def test_a_search_that_cannot_be_is_refused_with_its_field(search, message):
    with pytest.raises(ValidationError, match=message):
        base = {"learning_rates": (), "labels": Labels(), "steps": 60}
        shared = {"kind": "random", "over": OVER} | ({} if search.get("kind") == "pbt" else {"trials": 4})
        configuration(**base, search=shared | search)


def test_pbt_needs_one_held_out_part_and_all_the_steps():
    config = {"learning_rates": (), "search": PBT, "steps": 60}
    with pytest.raises(
        ValidationError, match=r"search\.kind pbt needs one held-out part, but labels.per_class has"
    ):
        configuration(**config)
    stopping = {"evaluations": 4, "patience": 2}
    with pytest.raises(
        ValidationError, match="pbt compares trials after the same steps: leave out early_stopping"
    ):
        configuration(**config, labels=Labels(), early_stopping=stopping)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    put_halves(folder / "dataset")
    return folder / "dataset"


def test_where_a_search_stands_is_said_while_it_runs():
    search = {"kind": "grid", "over": {"steps": [30, 40]}}
    config = configuration(labels=Labels(), learning_rates=(0.01, 0.1), search=search)
    ended: dict[tuple[int, int], Trial] = {}

    class Entries:
        @staticmethod
        def trial(place: tuple[int, int]) -> tuple[int, Trial] | None:
            return (1, ended[place]) if place in ended else None

    def said(folds: int = 1) -> str:
        return standing(config, Entries(), folds)

    assert said() == "0 of 4 trials have ended"
    ended |= {(0, 0): Trial(0.5, 1.0, 30), (3, 0): Trial(0.75, 1.0, 40)}
    assert (
        said() == "2 of 4 trials have ended; the best is trial 3, accuracy 0.750: learning rate 0.1, steps 40"
    )
    ended[3, 0] = ended[3, 0]._replace(is_pruned=True)
    assert said().startswith("2 of 4 trials have ended; the best is trial 0, accuracy 0.500")
    ended[0, 1] = Trial(0.25, 1.0, 30)
    assert said(folds=2).startswith("1 of 4 trials have ended; the best is trial 0, accuracy 0.375")


def test_a_search_says_how_long_it_still_takes_and_its_trials_after_each_quarter():
    config = searching("asha", trials=8)
    ended: dict[tuple[int, int], Trial] = {}

    class Entries:
        @staticmethod
        def trial(place: tuple[int, int]) -> tuple[int, Trial] | None:
            return (1, ended[place]) if place in ended else None

    def said(deadline: float = math.inf) -> list[str]:
        return standing(config, Entries(), 1, concurrent=2, deadline=deadline).splitlines()

    steps = [config.at(point).steps for point in points(config)]
    ended[0, 0] = Trial(0.5, 1.0, steps[0], seconds=60)
    # a trial that ended after half of its steps would have taken twice the time
    ended[1, 0] = Trial(0.25, 1.0, steps[1] // 2, is_pruned=True, seconds=120 * (steps[1] // 2) / steps[1])
    first, *table = said()
    assert first.startswith(
        "2 of 8 trials have ended, at most 0:04:30 left for the search; the best is trial 0, accuracy 0.500"
    )
    assert [line.split(":")[0] for line in table] == ["  0.500  trial 0", "  0.250  trial 1"]
    assert "(ended at step" in table[1]
    ended[2, 0] = Trial(0.75, 1.0, steps[2], seconds=60)
    assert len(said()) == 1, "the next table comes after the second quarter"
    assert "at most 0:01:00 left of search.minutes" in said(time.time() + 60.2)[0]
    assert time_left(90, math.inf, is_limit=False) == "0:01:30 left for the search"


@pytest.mark.ray
@pytest.mark.slow
def test_optuna_continues_from_the_largest_seed():
    point = {"learning_rate": 1e-2, "optimizer.weight_decay": 0.1, "steps": 30}
    proposer(searching("optuna", seed=2**32 - 1), [Tried(0, point, 0.5)])


@pytest.mark.parametrize("kind", ["random", "asha", "optuna"])
def test_a_search_that_goes_on_repeats_no_trial(kind, dataset, tmp_path, local_ray, capsys):
    """Attempt 1 leaves two of its trials unfinished; attempt 2 does these and no other."""
    config = searching(kind, trials=6)
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
    if kind == "asha":
        assert 1 <= len(whole) < 6, "some were ended early"
    else:
        assert len(whole) == 6
        again = [before[name]["accuracy"] for name in lost]
        assert [after[name]["accuracy"] for name in lost] == again, "the same points"


def folder(root: Path, number: int) -> Path:
    return next((root / "store").glob(f"artifacts/finetune/*/attempts/{number}/ledger"))


def ledger(root: Path, number: int) -> dict[str, Any]:
    """An attempt's entries by name."""
    return {path.name: json.loads(path.read_text()) for path in folder(root, number).glob("*.json")}
