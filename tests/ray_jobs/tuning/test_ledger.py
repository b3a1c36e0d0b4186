"""A fine-tuning that is killed anywhere goes on from its ledger, and writes what an undisturbed one writes."""

import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.identity import canonical_json, sha256
from pipelines.spec import CheckpointEvery
from pipelines.store import Layout, create_attempt
from pipelines.store import folder as folder_store
from ray_jobs import finetune
from ray_jobs.evaluation.rows import PROBABILITIES
from ray_jobs.process.context import Context, Result
from ray_jobs.training import optim
from ray_jobs.training.task import Score, at_point, make_task
from ray_jobs.tuning import fits as fits_module
from ray_jobs.tuning import ledger, runner
from ray_jobs.tuning.runner import held_out_temperature
from ray_jobs.tuning.trial import Refitted
from tests.simulation.loop import Killed
from tests.support import finetuning
from tests.support.finetuning import COST, configuration, context, put_halves, refitted, save_at_once
from tests.support.records import flip
from tests.support.stores import repeated, snapshot

CONFIG = configuration(learning_rates=(1e30, 1e-2), steps=4)  # the first diverges
TRIALS = [f"trial-{rate}-{fold}.json" for rate in (0, 1) for fold in (0, 1)]
ENTRIES = {*TRIALS, "refit-0.json", "refit-1.json"}


class Fits:
    """The fits of a stage, one after the other in this process instead of in Ray's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = self.moments = 0
        self.order = 1  # -1: the last trial and the last refit come first
        # the moment of death; each entry has two: before and after it is written
        self.last: int | None = None
        fit_one, add = fits_module.fit, ledger._add

        def counted(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            return fit_one(*arguments, **named)

        def add_or_die(*arguments: Any) -> bool:
            self.live()
            is_first = add(*arguments)
            self.live()
            return is_first

        def trials(given: Any, pools: Any, folds: Any, missing: Any, finished: Any) -> None:
            for task, fold in missing[:: self.order]:
                fits_module.trial(given, task, pools[0], folds, fold)

        def refits(given: Any, task: Any, pools: Any, draws: Any) -> list[Refitted]:
            done = [fits_module.refit(given, task, pools[draw], draw) for draw in draws[:: self.order]]
            return done[:: self.order]

        patch.setattr(fits_module, "fit", counted)
        patch.setattr(ledger, "_add", add_or_die)
        patch.setattr(runner, "run_trials", trials)
        patch.setattr(finetune, "run_refits", refits)
        patch.setattr(finetune, "measure_cost", lambda *_: COST)

    def live(self) -> None:
        self.moments += 1
        if self.moments == self.last:
            raise Killed

    def run(self, given: Context[Any]) -> Result:
        """An attempt's result, but for the log; afterwards `count` is how many fits it did."""
        self.count = self.moments = 0
        result = finetune.main(given)
        return replace(result, files=tuple(repeated(result.files)))


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> Fits:
    return Fits(monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A store whose first attempt did everything but commit, and its result."""
    folder = tmp_path_factory.mktemp("undisturbed")
    put_halves(folder / "dataset")
    with pytest.MonkeyPatch.context() as patch:
        first = context(folder / "store", folder / "dataset", CONFIG)
        create_attempt(first.open_store(), first.attempt)
        result = Fits(patch).run(first)
    assert in_ledger(folder / "store", 1) == ENTRIES
    return folder / "store", result


@pytest.fixture
def store(undisturbed: tuple[Path, Result], tmp_path: Path) -> Path:
    """A copy of that store."""
    return shutil.copytree(undisturbed[0], tmp_path / "store")


def attempt(root: Path, number: int, **fields: Any) -> Context[Any]:
    return finetuning.attempt(root, CONFIG, number, **fields)


def folder(root: Path, number: int = 1) -> Path:
    return root / Layout.ledger("finetune", "k", number)


def in_ledger(root: Path, number: int) -> set[str]:
    """The entries; every refit has a Parquet file beside its own."""
    names = {path.name for path in folder(root, number).iterdir()}
    return {name for name in names if name.endswith(".json")}


@pytest.mark.parametrize(
    ("moment", "attempts", "last_fits"), [(2, 7, 0), (3, 6, 1)], ids=["after an entry", "before the next one"]
)
def test_killed_between_any_two_entries_it_fits_only_the_rest_and_writes_the_same_bytes(
    moment: int, attempts: int, last_fits: int, fits: Fits, undisturbed: tuple[Path, Result], store: Path
) -> None:
    """Each attempt writes one entry before it dies."""
    shutil.rmtree(store / "artifacts/finetune")
    fits.last = moment
    written: list[str] = []
    for number in range(1, attempts):
        with pytest.raises(Killed):
            fits.run(attempt(store, number))
        assert fits.count == moment - 1
        written += in_ledger(store, number)
        assert len(written) == number
    before = snapshot(store)
    last = attempt(store, attempts)
    result = fits.run(last)
    assert fits.count == last_fits
    assert {*written} | ({"refit-1.json"} if last_fits else set()) == ENTRIES
    assert result == undisturbed[1], "digests of all files, metrics"
    last.open_store().local(Layout.files("finetune", "k", attempts), result.files)
    after = snapshot(store)
    assert all(after[path] == before[path] for path in before if Path(path).is_file()), "earlier attempts'"


def test_killed_at_any_third_step_it_repeats_none_and_writes_the_same_bytes(
    fits: Fits, undisturbed: tuple[Path, Result], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checkpoint after every step, none of which is left, and several fits begun, as when they run at once."""
    steps, last = 0, sys.maxsize
    learning_rate = optim.learning_rate

    def rate_or_die(*arguments: Any) -> float:
        nonlocal steps
        if steps == last:
            raise Killed
        steps += 1
        return learning_rate(*arguments)

    save_at_once(monkeypatch)
    monkeypatch.setattr(optim, "learning_rate", rate_or_die)
    shutil.rmtree(store / "artifacts/finetune")
    fits.run(attempt(store, 1))
    needed, steps = steps, 0
    shutil.rmtree(store / "artifacts/finetune")

    config = CONFIG.model_copy(update={"checkpoint_every": CheckpointEvery(steps=1)})
    for number in itertools.count(1):
        last, fits.order = steps + 2, 1 if number % 2 else -1
        with suppress(Killed):
            result = fits.run(finetuning.attempt(store, config, number))
            break
    assert result == undisturbed[1]
    assert steps == needed
    assert number == math.ceil(needed / 2) > 8
    assert not [*store.rglob("checkpoints")]


def test_what_it_takes_over_is_in_the_log(fits: Fits, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder(store) / "trial-1-1.json").unlink()
    (folder(store) / "refit-0.json").unlink()
    fits.run(attempt(store, 2))
    out = re.sub(r"(accuracy|loss) [\d.]+", r"\1 x", capsys.readouterr().out)
    assert [line for line in out.splitlines() if line.startswith(("learning rate", "draw"))] == [
        "learning rate 1e+30, fold 0: diverged (from attempt 1)",
        "learning rate 0.01, fold 0: accuracy x, loss x (from attempt 1)",
        "learning rate 1e+30, fold 1: diverged (from attempt 1)",
        "learning rate 0.01, fold 1: accuracy x, loss x",
        "draw 1: test accuracy x (from attempt 1)",
        "draw 0: test accuracy x",
    ]


def rewrite(path: Path, sealed: bool = True, **fields: Any) -> None:
    """Change fields of an entry; with `sealed`, as somebody would who also knows the checksum."""
    entry = json.loads(path.read_text()) | fields
    if sealed:
        entry["sha256"] = sha256(canonical_json({name: entry[name] for name in entry if name != "sha256"}))
    path.write_text(json.dumps(entry))


def images(root: Path, draw: int = 1) -> Path:
    (path,) = folder(root).glob(f"refit-{draw}-*.parquet")
    return path


def outside(root: Path) -> None:
    entry = json.loads((folder(root) / "refit-0.json").read_text())
    files = [entry["files"][0], entry["files"][1] | {"path": "../../1/attempt.json"}]
    rewrite(folder(root) / "refit-0.json", files=files)


def a_folder(root: Path) -> None:
    (folder(root) / "trial-1-0.json").unlink()
    (folder(root) / "trial-1-0.json").mkdir()


MODEL = Path(Layout.files("finetune", "k", 1), "model.safetensors")
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another accuracy": (
        lambda root: rewrite(folder(root) / "trial-0-1.json", sealed=False, accuracy=0.75),
        "its checksum does not match",
    ),
    "half": (lambda root: (folder(root) / "trial-1-0.json").write_text('{"accuracy": 0.'), "is not used"),
    "a copy of another": (
        lambda root: shutil.copy(folder(root) / "trial-1-1.json", folder(root) / "trial-1-0.json"),
        "it is a copy of",
    ),
    "60 MB": (lambda root: os.truncate(folder(root) / "refit-1.json", 60 * 2**20), "a record has at most"),
    "a folder": (a_folder, "it is not a file"),
    "a bit of the model": (lambda root: flip(root / MODEL), "the refit is not used"),
    "files outside": (outside, "files: "),
    "a bit of its images": (lambda root: flip(images(root)), "its sha256 differs"),
    "no images": (lambda root: images(root).unlink(), "it is missing; the refit is not used"),
    "images elsewhere": (
        lambda root: rewrite(
            folder(root) / "refit-1.json", images={"path": "../attempt.json", "size": 2, "sha256": "0"}
        ),
        "images: ../attempt.json is not the name of a file",
    ),
    "another learning rate": (lambda root: rewrite(folder(root) / "refit-1.json", learning_rate=0.5), ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_computed_again(
    damage: str, fits: Fits, undisturbed: tuple[Path, Result], store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = DAMAGE[damage]
    change(store)
    result = fits.run(attempt(store, 2))
    assert fits.count == 1, "nothing else is"
    assert said in capsys.readouterr().out
    assert result == undisturbed[1]


def test_an_entry_does_not_grow_with_the_number_of_test_images(undisturbed: tuple[Path, Result]) -> None:
    """A record may have at most 32 MiB; what a refit says of each image is not in it."""
    sizes = []
    given = attempt(undisturbed[0], 99)
    task = make_task(given.config, given.dataset(), None)
    for count in (10, 100_000):
        columns = {"probability": 0.5, "nll": 0.7, "top5": [0, 1], "top5_probabilities": [0.5, 0.5]}
        rows = {name: count * [columns.get(name)] for name in PROBABILITIES.names}
        table = pa.table(rows, PROBABILITIES)
        score = Score(1.0, 0.7, np.arange(count) % 2, table)
        images = ledger.add_images(given, count, ledger.images_table(score))
        ledger.add_refit(given, count, refitted(score, images=images, step=4).record)
        sizes.append((folder(undisturbed[0], 99) / f"refit-{count}.json").stat().st_size)
        found = ledger.Ledger(given, []).refit(task, count)
        assert found is not None and found.images.select(PROBABILITIES.names).equals(table)
        np.testing.assert_array_equal(finetune.predicted(found), score.predictions)
    assert abs(sizes[1] - sizes[0]) < 50 < min(sizes) < 2000


def test_bits_that_a_disk_lost_after_the_files_were_checked_are_not_committed(
    fits: Fits, undisturbed: tuple[Path, Result], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(store / MODEL)
    monkeypatch.setattr(folder_store, "fault", lambda path, entry: None)
    assert fits.run(attempt(store, 2)) == undisturbed[1]
    assert fits.count == 1


def test_what_other_code_has_finished_is_computed_again(
    fits: Fits, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fits.run(attempt(store, 2, code="other"))
    assert fits.count == 6
    said = "the work of attempt 1 is not used: it ran other code"
    assert capsys.readouterr().out.count(said) == 1
    fits.run(attempt(store, 3))
    assert fits.count == 0, "the first attempt's code again"


def test_an_attempt_with_a_damaged_record_is_not_believed(
    fits: Fits, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / Layout.attempt("finetune", "k", 1) / "attempt.json").write_text("{}")
    fits.run(attempt(store, 2))
    assert fits.count == 6
    assert "the work of attempt 1 is not used: " in capsys.readouterr().out


def test_a_task_that_ray_runs_again_fits_nothing(fits: Fits, undisturbed: tuple[Path, Result], store: Path) -> None:
    """If a node is lost, Ray repeats finished tasks whose results it held."""
    again = attempt(store, 1)
    task = make_task(again.config, again.dataset(), None)
    task = at_point(task, 1, {"learning_rate": 1e-2}, again.dataset())
    found = [ledger.open_ledger(again).trial(task.trial(fold)) for fold in (0, 1)]
    trials = [each[1] for each in found if each is not None]
    task = task._replace(temperature=held_out_temperature(trials))
    unused: Any = None
    for draw in (0, 1):
        fits_module.refit(again, task, unused, draw)
    assert fits.run(again) == undisturbed[1]
    assert fits.count == 0
