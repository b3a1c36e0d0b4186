"""`report compare`: on the images that both have; may B replace A, and a table for a pull request."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.results.compare import match, measurements
from pipelines.results.gate import gate, markdown
from pipelines.results.lookup import find_manifests
from pipelines.spec import RecipeError
from pipelines.store import Store, open_store
from ray_jobs.detection.entries import Entry
from ray_jobs.detection.intervals import difference_interval
from ray_jobs.detection.tables import DETECTIONS, FILE
from ray_jobs.evaluation.intervals import paired_difference
from ray_jobs.evaluation.rows import MEDIAN_BOX, ROWS, Truth, write_table
from tests.support import in_process
from tests.support.records import committed
from tests.support.scores import Scores, compare, put_scores

COUNT = 400
IDS = [f"image_{number:03d}" for number in range(COUNT)]
LABELS = np.arange(COUNT) % 4
RNG = np.random.default_rng(0)
A = RNG.random(COUNT) < 0.7
BETTER, WORSE = A | (RNG.random(COUNT) < 0.5), A & (RNG.random(COUNT) < 0.7)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = open_store(str(tmp_path_factory.mktemp("gate")))
    whole = {"aa": (A, COUNT), "better": (BETTER, COUNT), "worse": (WORSE, COUNT), "k-nn": (WORSE, COUNT)}
    for key, (right, last) in (whole | {"part": (WORSE, 300)}).items():
        shown = slice(COUNT - last, COUNT)
        truth = Truth("digits", IDS[shown], LABELS[shown])
        wrong = (LABELS[shown] + 1) % 4
        method = "k-NN" if key == "k-nn" else "ViT"
        scores = Scores(method, "fine-tuning", None, np.where(right[shown], LABELS[shown], wrong)[None], truth)
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


def test_the_table_names_both_methods_and_how_many_images_they_share(store: Store) -> None:
    (row,) = (line for line in markdown(store, match(store, "aa", "part")) if line.startswith("| digits"))
    assert row.startswith("| digits, ViT, all labels | ") and row.endswith(" | 300 in common of 400 |")
    (row,) = (line for line in markdown(store, match(store, "aa", "k-nn")) if line.startswith("| digits"))
    assert row.startswith("| digits, A: ViT, B: k-NN, all labels | ")


def test_the_table_has_the_images_that_flipped_and_the_classes_that_lost(store: Store) -> None:
    text = "\n".join(markdown(store, match(store, "aa", "worse")))
    lost = int((A & ~WORSE).sum())
    assert f"**digits, ViT, all labels: {lost:,} images that only A has right**" in text
    assert "**digits, ViT, all labels: 0 images that only B has right**" in text
    assert text.count("| image\\_") == 20 and f"| {lost - 20:,} more | | |" in text
    assert "**digits, ViT, all labels: 4 of 4 classes got worse**:" in text
    losses = [100 * (WORSE[label == LABELS].mean() - A[label == LABELS].mean()) for label in range(4)]
    assert f"{losses.index(min(losses))} {min(losses):+.2f}" in text.splitlines()[-1]


def test_detectors_are_compared_by_ap(tmp_path: Path) -> None:
    """The gate ignores the reference that both stages have, and compares the detections."""
    store = open_store(str(tmp_path))
    rng = np.random.default_rng(0)
    found = {key: rng.random(COUNT) < share for key, share in (("aa", 0.6), ("bb", 0.9))}
    for key, images in found.items():
        put_detections(store, key, {"ViT, pretrained": images, MEDIAN_BOX: found["aa"] & False})
    expected = difference_interval(*(entry.halves for entry in _entries(store, "bb", "aa")))
    (line,) = [line for line in compare(store, "aa", "bb")["both"] if line["method"] == "ViT, pretrained"]
    assert [line["difference"][name] for name in ("value", "low", "high")] == [*expected]
    assert line["a"]["AP"] == pytest.approx(0.6, abs=0.05) and line["a"]["num_images"] == COUNT
    for b, code in (("bb", 0), ("aa", 1)):
        a = {"aa": "bb", "bb": "aa"}[b]
        done = in_process.vitflow("report", "compare", a, b, "--gate", "0.01", "--store", store.uri, check=code)
        assert done.stdout.count("allowed: -1") == 1
    assert "| AP, % (95% interval) | A | B |" in "\n".join(markdown(store, match(store, "aa", "bb")))
    put_detections(store, "cc", {"ViT, pretrained": found["bb"]}, x2=60.0)
    with pytest.raises(RecipeError, match="not scored on the same test images with the same annotations"):
        gate(match(store, "aa", "cc"), 0.01)
    put_detections(store, "few", {"ViT, pretrained": found["bb"][:9]})
    with pytest.raises(RecipeError, match="few: no AP to compare: fewer than 10 test images with annotations"):
        match(store, "aa", "few")


def put_detections(store: Store, key: str, found: dict[str, np.ndarray], x2: float = 50.0) -> None:
    """Commit a detection of images with one box each, which each method finds exactly or not at all."""
    box = {"x1": 10.0, "y1": 10.0, "x2": x2, "y2": 50.0, "label": 0}
    images = [
        {
            "task": "digits",
            "protocol": "detection",
            "method": method,
            "draw": 0,
            "sample_id": identity,
            "boxes": [box | {"ignored": False}],
            "found": [box | {"score": 0.5}] * int(is_found),
        }
        for method, is_right in found.items()
        for identity, is_found in zip(IDS, is_right, strict=False)
    ]
    with committed(store, "detect", key, config={"seed": 0}, nonce=key) as folder:
        write_table(folder / "rows.parquet", [], ROWS)
        write_table(folder / FILE, images, DETECTIONS)


def _entries(store: Store, *keys: str) -> list[Entry]:
    made = measurements(store, [manifest for key in keys for manifest in find_manifests(store, key)])
    return [entry for entry in made.scored if isinstance(entry, Entry) and entry.method != MEDIAN_BOX]
