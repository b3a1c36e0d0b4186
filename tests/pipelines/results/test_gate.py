"""`report compare`: on the images that both have; may B replace A, and a table for a pull request."""

import numpy as np
import pytest

from pipelines.results.compare import compare, match
from pipelines.results.gate import gate, markdown
from pipelines.spec import RecipeError
from pipelines.store import Store, open_store
from ray_jobs.evaluation.intervals import paired_difference
from ray_jobs.evaluation.rows import Truth
from tests.support import in_process
from tests.support.records import committed
from tests.support.scores import Scores, put_scores

COUNT = 400
IDS = [f"image_{number:03d}" for number in range(COUNT)]
LABELS = np.arange(COUNT) % 4
RNG = np.random.default_rng(0)
A = RNG.random(COUNT) < 0.7
BETTER, WORSE = A | (RNG.random(COUNT) < 0.5), A & (RNG.random(COUNT) < 0.7)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = open_store(str(tmp_path_factory.mktemp("gate")))
    whole = {"aa": (A, COUNT), "better": (BETTER, COUNT), "worse": (WORSE, COUNT)}
    for key, (right, last) in (whole | {"part": (WORSE, 300)}).items():
        shown = slice(COUNT - last, COUNT)
        truth = Truth("digits", IDS[shown], LABELS[shown])
        wrong = (LABELS[shown] + 1) % 4
        scores = Scores("ViT", "fine-tuning", None, np.where(right[shown], LABELS[shown], wrong)[None], truth)
        with committed(store, "evaluate", key, config={"seed": 0}, nonce=key) as folder:
            put_scores(folder, scores.scored())
    return store


def test_a_part_of_the_images_is_paired_on_what_both_have(store: Store) -> None:
    (line,) = compare(store, "aa", "part")["both"]
    expected = paired_difference(WORSE[None, 100:], A[None, 100:])
    assert [line["difference"][name] for name in ("value", "low", "high")] == [*expected]
    assert line["difference"]["paired"] and (line["a"]["num_images"], line["of_images"]) == (300, 400)
    said = in_process.vitflow("report", "compare", "aa", "part", "--store", store.uri).stdout
    assert "over the 300 test images that A and B have in common, of 400" in said


@pytest.mark.parametrize(("b", "code", "word"), [("better", 0, "passed"), ("worse", 1, "worse")])
def test_the_gate_is_an_exit_status(store: Store, b: str, code: int, word: str) -> None:
    done = in_process.vitflow("report", "compare", "aa", b, "--gate", "0.01", "--store", store.uri, check=code)
    assert f": {word}: " in done.stdout and "allowed: -1" in done.stdout


def test_what_is_not_shown_does_not_pass(store: Store) -> None:
    verdict = gate(match(store, "better", "aa"), 0.2)
    low = compare(store, "better", "aa")["both"][0]["difference"]["low"]
    assert verdict.is_open == (low > -0.2)
    assert not gate(match(store, "better", "aa"), -low).is_open
    with pytest.raises(RecipeError, match="--gate: A and B have no different measurements"):
        gate(match(store, "aa", "aa"), 0.1)


def test_the_table_has_the_images_that_flipped_and_the_classes_that_lost(store: Store) -> None:
    text = "\n".join(markdown(store, match(store, "aa", "worse")))
    lost = int((A & ~WORSE).sum())
    assert f"**digits: {lost:,} images that only A has right**" in text
    assert "**digits: 0 images that only B has right**" in text
    assert text.count("| image\\_") == 20 and f"| {lost - 20:,} more | | |" in text
    assert "**digits: 4 of 4 classes got worse**:" in text
    losses = [100 * (WORSE[label == LABELS].mean() - A[label == LABELS].mean()) for label in range(4)]
    assert f"{losses.index(min(losses))} {min(losses):+.2f}" in text.splitlines()[-1]
