"""Population-based training: who continues from whom, and that it is the same however often it was killed."""

import itertools
import json
import math
import re
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipelines.spec import CheckpointEvery, Finetune, Labels, Optimizer
from pipelines.store import create_attempt
from ray_jobs import finetune
from ray_jobs.process import devices
from ray_jobs.process.context import Context, Result
from ray_jobs.training import fit, ledger, optim, population
from ray_jobs.training import trials as trials_module
from ray_jobs.training.checkpoint import Saver
from ray_jobs.training.search import exploit_and_explore, points
from ray_jobs.training.task import Phase, Task, at_point, make_task, trial_name
from ray_jobs.training.workers import ALONE
from tests.support import finetuning
from tests.support.finetuning import configuration, context, put_halves
from tests.support.stores import repeated

OVER: dict[str, Any] = {
    "learning_rate": {"low": 1e-4, "high": 1e-1, "scale": "log"},
    "optimizer.weight_decay": [0.0, 0.1, 1.0],
    "label_smoothing": {"low": 0.0, "high": 0.5},
    "mixup": {"low": 0.1, "high": 1.0},
}
MEMBERS, ROUNDS, STEPS = 4, 3, 10
ROUND_ENDS = [4, 7, 10]


def configured(**search: Any) -> Finetune:
    fields = {"kind": "pbt", "over": OVER, "members": MEMBERS, "rounds": ROUNDS} | search
    return configuration(
        randaugment={"layers": 1, "magnitude": 2},
        learning_rates=(),
        labels=Labels(),
        steps=STEPS,
        dtype="float32",
        refits=2,
        search=fields,
    )


CONFIG = configured()


def test_the_worst_continue_from_the_best_with_other_values_in_their_ranges() -> None:
    config = configured(members=20, over=OVER | {"randaugment.layers": {"low": 1, "high": 4}}, resample=0.0)
    current = points(config)
    scores: list[Any] = [(0.5 + member / 100, 1.0) for member in range(20)]
    scores[19] = None
    scores[18] = scores[17]  # a tie, of which the first is the better one
    found = exploit_and_explore(config, 3, current, scores)
    assert found == exploit_and_explore(config, 3, current, scores), "a pure function"
    assert found != exploit_and_explore(config, 4, current, scores)
    replaced = [member for member, (parent, _) in enumerate(found) if parent != member]
    assert replaced == [0, 1, 2, 3, 19], "a quarter, of which one diverged"
    assert {found[member][0] for member in replaced} <= {14, 15, 16, 17, 18}
    assert all(point == current[member] for member, (parent, point) in enumerate(found) if parent == member)
    for member in replaced:
        parent, point = found[member]
        before = current[parent]
        for path, value in point.items():
            if path == "optimizer.weight_decay":
                values = OVER[path]
                assert abs(values.index(value) - values.index(before[path])) <= 1
            elif path == "randaugment.layers":
                assert value == min(4, max(1, value)) and abs(value - before[path]) <= 1
            else:
                low, high = (OVER[path][end] for end in ("low", "high"))
                allowed = [min(max(before[path] * factor, low), high) for factor in (0.8, 1.2)]
                assert any(math.isclose(value, each, rel_tol=1e-3) for each in allowed)


def test_values_are_drawn_anew_as_often_as_asked() -> None:
    config = configured(members=400, over={"learning_rate": OVER["learning_rate"]}, quantile=0.5)
    current = points(config)
    found = exploit_and_explore(config, 0, current, [(member / 400, 1.0) for member in range(400)])
    kinds: Counter[str] = Counter()
    for parent, point in found[:200]:
        ratio = point["learning_rate"] / current[parent]["learning_rate"]
        is_near = [math.isclose(ratio, factor, rel_tol=1e-3) for factor in (0.8, 1.2)]
        kinds["0.8" if is_near[0] else "1.2" if is_near[1] else "other"] += 1
    assert 30 < kinds["other"] < 70, "a quarter of 200, with a deviation of 6, and a few at the ends"
    assert min(kinds["0.8"], kinds["1.2"]) > 50, "75 each"
    assert len({parent for parent, _ in found[:200]}) > 100, "of 200 equally likely ones"


class Killed(BaseException):
    """What SIGKILL is to the stage's code."""


class Population:
    """The fits of a stage, one after the other in this process instead of in Ray's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fits: list[str] = []
        self.steps = self.moments = 0
        self.order = 1  # -1: the last member comes first
        self.last_step: int | None = None  # of the process, in which it dies
        self.last_moment: int | None = (
            None  # each entry of the ledger has two: before and after it is written
        )
        make_saver, add, learning_rate, save = (
            trials_module.make_saver,
            ledger._add,
            optim.learning_rate,
            Saver.save,
        )

        def named(given: Any, name: str, worker: Any) -> Any:
            self.fits.append(name)
            return make_saver(given, name, worker)

        def add_or_die(*arguments: Any) -> bool:
            self._live()
            is_first = add(*arguments)
            self._live()
            return is_first

        def rate_or_die(*arguments: Any) -> float:
            if self.steps == self.last_step:
                raise Killed
            self.steps += 1
            return learning_rate(*arguments)

        def save_now(saver: Saver, *arguments: Any) -> None:
            save(saver, *arguments)
            saver.wait()

        def members(given: Any, pool: Any, folds: Any, tasks: Any, *_: Any) -> Any:
            done = [population.run_member(given, task, pool, folds, 0) for task in tasks[:: self.order]]
            return done[:: self.order]

        def refits(given: Any, task: Any, pools: Any, draws: Any) -> Any:
            return [trials_module.refit(given, task, pools[draw], draw) for draw in draws]

        patch.setattr(trials_module, "make_saver", named)
        patch.setattr(ledger, "_add", add_or_die)
        patch.setattr(optim, "learning_rate", rate_or_die)
        patch.setattr(Saver, "save", save_now)
        patch.setattr(population, "run_round", members)
        patch.setattr(finetune, "run_refits", refits)
        patch.setattr(devices, "fit_resources", lambda *_: ({"CPU": 1.0}, 1))

    def _live(self) -> None:
        self.moments += 1
        if self.moments == self.last_moment:
            raise Killed

    def run(self, given: Context[Any]) -> Result:
        """An attempt's result, but for the log."""
        self.fits, self.moments = [], 0
        result = finetune.main(given)
        return replace(result, files=tuple(repeated(result.files)))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Population:
    return Population(monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, int]:
    """A store whose first attempt did everything but commit, its result, and its steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    put_halves(folder / "dataset")
    with pytest.MonkeyPatch.context() as patch:
        first = context(folder / "store", folder / "dataset", CONFIG)
        create_attempt(first.open_store(), first.attempt)
        whole = Population(patch)
        result = whole.run(first)
    assert whole.steps == MEMBERS * STEPS + 2 * STEPS
    return folder / "store", result, whole.steps


@pytest.fixture
def store(undisturbed: tuple[Path, Result, int], tmp_path: Path) -> Path:
    """A store with the dataset only."""
    root = shutil.copytree(undisturbed[0], tmp_path / "store")
    shutil.rmtree(root / "artifacts/finetune")
    return root


def attempt(root: Path, number: int, **fields: Any) -> Context[Any]:
    return finetuning.attempt(root, CONFIG.model_copy(update=fields), number)


def sweep_of(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        next(root.glob("artifacts/finetune/*/attempts/*/files/sweep.json")).read_text()
    )
    return found


def test_it_says_who_continued_from_whom_and_refits_the_best_members_schedule(
    undisturbed: tuple[Path, Result, int],
) -> None:
    root, result, _ = undisturbed
    sweep = sweep_of(root)
    members = sweep["trials"]
    assert [len(member["rounds"]) for member in members] == [ROUNDS] * MEMBERS
    copies = [[member["rounds"][number].get("copied") for member in members] for number in range(ROUNDS)]
    assert [sum(each is not None for each in row) for row in copies] == [0, 1, 1], (
        "a quarter after each round"
    )
    for number in (1, 2):  # the member with the highest accuracy, and the lowest
        before = [member["rounds"][number - 1] for member in members]
        rank = sorted(
            range(MEMBERS), key=lambda each: (-before[each]["accuracy"], before[each]["loss"], each)
        )
        assert copies[number][rank[-1]] == rank[0]
    chosen = members[sweep["chosen_trial"]]
    assert chosen["accuracies"] == [max(member["accuracies"][0] for member in members)]
    assert [phase["step"] for phase in chosen["schedule"]] == [0, *ROUND_ENDS[:-1]]
    assert result.metrics["learning_rate"] == chosen["point"]["learning_rate"]
    rates = {phase["step"]: phase["point"]["learning_rate"] for phase in chosen["schedule"]}
    curves = json.loads(next(root.glob("artifacts/finetune/*/attempts/*/files/curves.json")).read_text())
    for curve in curves:
        assert [point["learning_rate"] for point in curve["points"]] == [
            optim.learning_rate(
                step, STEPS, rates[max(start for start in rates if start <= step)], CONFIG.optimizer
            )
            for step in range(STEPS)
        ]
    assert not [*root.rglob("checkpoints/*/*/manifest.json")], "superseded ones are removed"


def test_a_schedule_is_what_fits_with_constant_values_do_one_after_the_other(store: Path) -> None:
    """Each continues from the checkpoint of the one before, with its own values from the start."""
    given = attempt(store, 1, search=None, learning_rates=(0.01,))
    pools, supports = finetune.labelled(given.config, given.dataset())
    train = pools[0].take(supports.folds[0][0])
    values = [
        {"learning_rate": 0.03, "optimizer.weight_decay": 1.0, "label_smoothing": 0.3, "mixup": 0.0},
        {"learning_rate": 0.01, "optimizer.weight_decay": 0.0, "label_smoothing": 0.0, "mixup": 0.5},
        {"learning_rate": 0.02, "optimizer.weight_decay": 2.0, "label_smoothing": 0.1, "mixup": 0.2},
    ]

    def trained(task: Task, name: str | None = None) -> Any:
        saver = None if name is None else trials_module.make_saver(given, name, ALONE)
        model, *_ = fit.fit(task, train, task.learning_rate, 0, saver=saver)
        if saver is not None:
            saver.wait()
        return {key: weight.numpy() for key, weight in model.state_dict().items()}

    for optimizer in (
        Optimizer(),
        Optimizer(decay="times_schedule"),
        Optimizer(name="muon", ema=0.9),
        Optimizer(name="sgd"),
    ):
        name = f"{optimizer.name}-{optimizer.decay}"
        task = make_task(given.config.model_copy(update={"optimizer": optimizer}), given.dataset(), None)
        starts = [0, *ROUND_ENDS[:-1]]
        for number, (point, end) in enumerate(zip(values, ROUND_ENDS, strict=True)):
            constant = at_point(task, 0, point, given.dataset())._replace(last_step=end)
            if number:
                constant = constant._replace(ancestors=(f"{name}-{number - 1}",))
            # a schedule of one phase makes the fit keep its last state
            expected = trained(constant._replace(schedule=(Phase(0, 0, point),)), f"{name}-{number}")
        schedule = tuple(Phase(start, 0, point) for start, point in zip(starts, values, strict=True))
        ours = trained(at_point(task, 0, values[-1], given.dataset())._replace(schedule=schedule))
        assert all(np.array_equal(ours[key], expected[key]) for key in expected)
        other = (*schedule[:1], schedule[1]._replace(point=values[0]), *schedule[2:])
        assert any(
            not np.array_equal(weight, expected[key])
            for key, weight in trained(
                at_point(task, 0, values[-1], given.dataset())._replace(schedule=other)
            ).items()
        )


@pytest.mark.slow
def test_killed_at_any_third_step_it_repeats_none_and_writes_the_same_bytes(
    stage: Population, undisturbed: tuple[Path, Result, int], store: Path
) -> None:
    """With a checkpoint after every step; also between rounds, and with members in the other order."""
    for number in itertools.count(1):
        stage.last_step, stage.order = stage.steps + 2, 1 if number % 2 else -1
        with suppress(Killed):
            result = stage.run(attempt(store, number, checkpoint_every=CheckpointEvery(steps=1)))
            break
    assert result == undisturbed[1], "digests of all files, metrics"
    assert stage.steps == undisturbed[2] and number == math.ceil(stage.steps / 2)
    assert not [*store.rglob("checkpoints/*/*/manifest.json")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "repeated_steps"),
    [(2, 0), (3, MEMBERS * 3 + 2 * STEPS)],
    ids=["after an entry", "before the next one"],
)
def test_killed_at_any_entry_it_trains_no_finished_round_again(
    moment: int,
    repeated_steps: int,
    stage: Population,
    undisturbed: tuple[Path, Result, int],
    store: Path,
) -> None:
    """Each attempt writes one entry before it dies.

    A round that has its last checkpoint and no entry is scored again, not trained; the last round and the refits have
    none.
    """
    stage.last_moment = moment
    for number in itertools.count(1):
        with suppress(Killed):
            result = stage.run(attempt(store, number))
            break
    assert result == undisturbed[1]
    assert number == MEMBERS * ROUNDS + 2 + (moment == 2)
    assert stage.steps == undisturbed[2] + repeated_steps


def test_without_the_checkpoint_it_continues_from_it_repeats_the_rounds_before(
    stage: Population, undisturbed: tuple[Path, Result, int], store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.last_step = MEMBERS * ROUND_ENDS[0] + 1  # in the second round
    with pytest.raises(Killed):
        stage.run(attempt(store, 1))
    files = [*store.rglob("checkpoints/trial-*-0-*/*/*.safetensors")]
    assert len(files) == MEMBERS
    for path in files:
        path.write_bytes(b"")
    stage.last_step = None
    assert stage.run(attempt(store, 2)) == undisturbed[1]
    out = capsys.readouterr().out
    assert out.count("is damaged") >= MEMBERS
    assert out.count("step 0: repeating the rounds since, no checkpoint of which can be used") == MEMBERS


def test_the_same_member_with_another_schedule_is_another_fit(store: Path) -> None:
    """On GPUs, results vary a little, and another attempt may have ranked the members otherwise."""
    given = attempt(store, 1)
    task = make_task(given.config, given.dataset(), None)
    base = at_point(task, 1, points(CONFIG)[1], given.dataset())
    one = base._replace(schedule=(Phase(0, 1, base.point), Phase(4, 1, base.point)))
    other = base._replace(schedule=(Phase(0, 0, base.point), Phase(4, 1, base.point)))
    assert trial_name(one.place(0)) != trial_name(other.place(0))
    assert trials_module.refits_prefix(one) != trials_module.refits_prefix(other)
    assert one.chosen == base.point | {"schedule": [{"step": 0, "point": base.point}]}


def test_when_the_minutes_are_over_the_refit_does_all_steps_with_the_last_values(
    stage: Population, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(
        0, 30
    )  # 30 s between two looks: the second round begins after 60, the third would after 90
    monkeypatch.setattr(population, "time", SimpleNamespace(time=lambda: float(next(clock))))
    given = finetuning.attempt(store, configured(minutes=1.25), 1)
    result = stage.run(given)
    sweep = sweep_of(store)
    (count,) = {len(member["rounds"]) for member in sweep["trials"]}
    assert 1 <= count < ROUNDS and len(sweep["trials"][0]["schedule"]) == count
    assert stage.steps == MEMBERS * ROUND_ENDS[count - 1] + 2 * STEPS
    assert "temperature" not in result.metrics, "nothing was held out from a whole training"


@pytest.mark.ray
@pytest.mark.slow
def test_on_ray_with_several_members_at_once_it_is_the_same(
    undisturbed: tuple[Path, Result, int], store: Path, local_ray: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    result = finetune.main(attempt(store, 1))
    assert replace(result, files=tuple(repeated(result.files))) == undisturbed[1]
    out = capfd.readouterr().out
    assert re.search(
        r"round 1 of 3 has ended, \d:\d\d:\d\d left for the search; the trials by accuracy on dev:\n  0\.\d+  trial ",
        out,
    )
    assert re.search(r"trial \d continues from trial \d with learning rate", out)
