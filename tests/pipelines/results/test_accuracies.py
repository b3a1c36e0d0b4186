"""Lists and comparisons of results: means, the best, and paired differences where they may be paired."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pipelines.results.accuracies import expected_optimism, list_results
from pipelines.results.compare import comparison_table
from pipelines.spec import RecipeError
from pipelines.store import Store, commit, input_ref, open_store, read_manifest
from ray_jobs.evaluation.intervals import mean_interval, paired_difference
from ray_jobs.evaluation.rows import MEAN_IOU, ROWS, Truth, measurement, write_predictions, write_table
from tests.conftest import Vitflow
from tests.support.records import committed, make_manifest
from tests.support.scores import Scores, compare, put_scores

IDS = [f"image {number:02d}" for number in range(60)]
LABELS = np.arange(60) % 3


def put(
    store: Store,
    key: str,
    method: str,
    right: np.ndarray,
    ids: list[str] = IDS,
    labels_per_class: int | None = 5,
    **fields: Any,
) -> None:
    """Commit an evaluation whose predictions are right where `right` [draws, images] says so."""
    truth = Truth("digits", ids, LABELS)
    scores = Scores(method, "few-shot linear", labels_per_class, np.where(right, LABELS, 7), truth)
    finished = f"2026-01-0{len(store.names('artifacts/evaluate')) + 1}T00:00:00+00:00"
    with committed(store, "evaluate", key, **{"config": {"seed": 0}, "finished": finished} | fields) as folder:
        put_scores(folder, scores.scored())


def put_report(store: Store, key: str, *of: str) -> None:
    """Commit a report of these evaluations."""
    references = [input_ref(store, read_manifest(store, "evaluate", each)) for each in of]  # type: ignore[arg-type]
    commit(store, make_manifest("report", key=key, inputs={"of": references}, config={"title": "T"}))


def answers(seed: int, share: float) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).random((4, 60)) < share)


A, B = answers(0, 0.7), answers(1, 0.8)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = open_store(str(tmp_path_factory.mktemp("reports")))
    put(store, "aa", "ViT", A, stage="probe")
    put(store, "bb", "ViT", B, stage="probe")
    put(store, "other_images", "ViT", B, [f"new {number:02d}" for number in range(60)])
    put(store, "seed", "ViT", B, config={"seed": 1})
    put(store, "pixels", "pixels", answers(2, 0.5), stage="pixels")
    put_report(store, "report", "aa", "pixels")
    return store


def test_the_same_images_and_draws_are_paired(store: Store) -> None:
    (line,) = compare(store, "aa", "bb")["both"]
    expected = paired_difference(B, A)
    assert line["difference"] == {
        "value": pytest.approx(B.mean() - A.mean()),
        "low": expected.low,
        "high": expected.high,
        "paired": True,
    }
    for side, right in (("a", A), ("b", B)):
        assert (line[side]["accuracy"], line[side]["low"], line[side]["high"]) == mean_interval(right)


def test_a_metric_of_predictions_is_compared_like_accuracy(store: Store) -> None:
    """Each side as scikit-learn computes it, and the difference of both, paired or not."""
    for other, paired in (("bb", True), ("seed", False)):
        (line,) = (found := compare(store, "aa", other, "balanced accuracy"))["both"]
        expected = [right.mean(axis=1).mean() for right in (A, B)]  # all images have one class
        assert [line[side]["balanced accuracy"] for side in ("a", "b")] == pytest.approx(expected)
        difference = line["difference"]
        assert difference["paired"] is paired
        assert difference["value"] == pytest.approx(expected[1] - expected[0])
        assert difference["low"] < difference["value"] < difference["high"]
        assert str(comparison_table(found).title).startswith("balanced accuracy %")
    with pytest.raises(RecipeError, match=r"--metric macro-f1: .* did you mean 'macro-F1'"):
        compare(store, "aa", "bb", "macro-f1")


@pytest.mark.parametrize("other", ["other_images", "seed"])
def test_other_images_or_other_draws_are_not_paired(store: Store, other: str) -> None:
    (line,) = compare(store, "aa", other)["both"]
    difference = line["difference"]
    assert not difference["paired"]
    assert difference["value"] == pytest.approx(B.mean() - A.mean())
    # two independent standard errors add up in squares
    widths = [side.high - side.low for side in (mean_interval(A), mean_interval(B))]
    assert difference["high"] - difference["low"] == pytest.approx(np.hypot(*widths), rel=0.05)


def test_with_other_numbers_of_draws_the_means_over_all_of_them_are_compared(tmp_path: Path) -> None:
    """Once only the draws in common counted, so a mean over three trainings became the accuracy of the first."""
    store = open_store(str(tmp_path))
    put(store, "aa", "ViT", A)
    put(store, "three", "ViT", B[:3])
    (line,) = compare(store, "aa", "three")["both"]
    assert (line["a"]["draws"], line["b"]["draws"], line["difference"]["paired"]) == (4, 3, True)
    assert line["a"]["accuracy"] == pytest.approx(A.mean())
    assert line["difference"]["value"] == pytest.approx(B[:3].mean() - A.mean())
    low, high = (np.mean(right, axis=1) for right in (A, B[:3]))
    draws = sum(stats.t.ppf(0.975, len(each) - 1) ** 2 * each.var(ddof=1) / len(each) for each in (low, high))
    images = stats.norm.ppf(0.975) ** 2 * (B[:3].mean(axis=0) - A.mean(axis=0)).var() / A.shape[1]
    assert line["difference"]["high"] - line["difference"]["value"] == pytest.approx(np.sqrt(draws + images))


def test_what_both_results_share_is_counted_and_not_shown(tmp_path: Path) -> None:
    """Two runs with the same baselines: the table was mostly rows of +0.0."""
    store = open_store(str(tmp_path))
    for key, method, right in (("k-nn", "k-NN", A), ("svm", "RBF SVM", A), ("one", "ViT", A), ("two", "ViT", B)):
        put(store, key, method, right)
    for key in ("one", "two"):
        put_report(store, f"report-{key}", "k-nn", "svm", key)
    table = comparison_table(compare(store, "report-one", "report-two"))
    *headings, only = (str(cell).strip() for cell in table.columns[0].cells)
    assert only == "ViT" and not {"k-NN", "RBF SVM"} & set(headings)
    assert table.caption == "not shown: 2 measurements that A and B share", "one interval needs no adjustment"


def test_one_method_is_paired_with_others_on_the_same_images(tmp_path: Path) -> None:
    """A ViT with pixels, also if it had other labels; what cannot be paired has a reason."""
    store = open_store(str(tmp_path))
    put(store, "vit", "ViT", A)
    put(store, "pixels", "pixels", B)
    put(store, "all", "k-NN", B[:1], labels_per_class=None)
    put(store, "elsewhere", "k-NN", B, [f"new {number:02d}" for number in range(60)])
    for method in ("mean", "median"):
        put(store, method, method, B)
    put_report(store, "two", "mean", "median")
    put_report(store, "others", "vit", "pixels")

    found = compare(store, "vit", "pixels")
    (line,) = found["both"]
    assert (line["protocol"], line["method"]) == ("few-shot linear", None)
    assert (line["a"]["method"], line["b"]["method"]) == ("ViT", "pixels")
    assert line["difference"] == paired_difference(B, A)._asdict() | {"paired": True}
    assert found["only_a"] == found["only_b"] == found["reasons"] == []
    assert [line["b"]["method"] for line in compare(store, "vit", "two")["both"]] == ["mean", "median"]
    (line,) = compare(store, "vit", "all")["both"]
    assert not line["difference"]["paired"] and line["b"]["labels_per_class"] is None

    found = compare(store, "others", "two")
    assert found["both"] == [] and len(found["only_a"]) == len(found["only_b"]) == 2
    assert found["reasons"] == ["digits, 5 per class: no pairs, because A has 2 methods and B 2 others"]
    found = compare(store, "all", "others")
    assert found["reasons"] == [
        "digits, no pairs: A has all labels and B 5 per class; only methods with the same labels are paired"
    ]
    assert [column.header for column in comparison_table(found).columns] == ["method", "A", "B"]
    found = compare(store, "vit", "elsewhere")
    assert found["reasons"] == ["no pairs: A was scored on digits, B on digits (other images)"]


def test_a_report_stands_for_what_it_is_of(store: Store) -> None:
    found = compare(store, "report", "bb")
    assert [line["method"] for line in found["both"]] == ["ViT"]
    assert found["reasons"] == []
    assert [line["method"] for line in found["only_a"]] == ["pixels"]
    assert found["only_b"] == []


def test_best_is_the_highest_mean_of_a_setting(store: Store) -> None:
    (best,) = list_results(store, None, None, "accuracy")
    assert best["mean"] == pytest.approx(B.mean())
    assert (best["method"], best["draws"]) == ("ViT", 4)
    assert best["key"] == "seed"  # the newest of equal ones
    (pixels,) = list_results(store, "digits", "pixels", "accuracy")
    assert pixels["key"] == "pixels"
    everything = list_results(store, "digits", None, None)
    assert len(everything) == 5
    assert best["judged"] == pixels["judged"] == 4, (
        "all results of models on this test set count, also those that are not listed; pixels are no model to choose"
    )
    assert best["optimism"] == expected_optimism(4, best["mean"], best["num_images"])


def test_other_metrics_are_listed_by_their_name_and_never_compared_as_accuracies(store: Store) -> None:
    """The best mIoU has no optimism, which is a formula for accuracies."""
    common = {"task": "masks", "protocol": "linear segmentation", "labels_per_class": None, "draw": 0}
    rows = [
        measurement(common | {"method": method}, MEAN_IOU, value, 60, "dev", {})
        for method, value in (("ViT", 0.75), ("pixels", 0.5))
    ]
    with committed(store, "evaluate", "masks", finished="2026-01-01T00:00:00+00:00") as folder:
        write_table(folder / "rows.parquet", rows, ROWS)
        write_predictions(folder / "predictions.parquet", [])
    (best,) = list_results(store, None, None, MEAN_IOU)
    assert (best["method"], best["mean"], best["judged"], best["optimism"]) == ("ViT", 0.75, 1, None)
    with pytest.raises(RecipeError, match="masks: no accuracy to compare; `report list`"):
        compare(store, "aa", "masks")


def test_the_best_of_several_equal_methods_is_as_optimistic_as_in_a_simulation() -> None:
    rng = np.random.default_rng(0)
    for judged, accuracy, images in ((1, 0.7, 500), (2, 0.9, 1_000), (30, 0.6, 2_000)):
        best = rng.binomial(images, accuracy, (20_000, judged)).max(axis=1) / images
        error = best.std() / len(best) ** 0.5
        expected = expected_optimism(judged, accuracy, images)
        assert best.mean() - accuracy == pytest.approx(expected, abs=4 * error + 2e-4), (
            judged,
            "2e-4: no normal",
        )


@pytest.mark.parametrize(
    ("task", "stage", "best", "message"),
    [
        ("digit", None, None, "--task digit: .* did you mean 'digits'"),
        (None, "prob", None, "did you mean 'probe'"),
        (None, None, "accurcy", "did you mean 'accuracy'"),
    ],
)
def test_what_was_not_measured_is_named(store: Store, task: str, stage: str, best: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        list_results(store, task, stage, best)


def test_the_commands(vitflow_here: Vitflow, store: Store) -> None:
    table = vitflow_here("report", "compare", "aa", "seed", "--store", store.uri, COLUMNS="80").stdout
    assert "not paired" in table and all(len(line) <= 80 for line in table.splitlines())
    same = vitflow_here("report", "compare", "report", "report", "--store", store.uri, COLUMNS="80").stdout
    assert "not shown: 2 measurements that A and B share" in " ".join(same.split()) and "(+0.0 to" not in same
    refused = vitflow_here("report", "compare", "nope", "aa", "--store", store.uri, check=2)
    assert "Traceback" not in refused.stderr


def test_results_on_another_number_of_test_images_are_another_setting(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    row = {"task": "digits", "protocol": "few-shot linear", "method": "ViT", "labels_per_class": 5, "draw": 0}
    for key, accuracy, images in (("first", 0.9, 500), ("second", 0.8, 500), ("grown", 0.7, 10_000)):
        with committed(store, "evaluate", key) as folder:
            write_table(folder / "rows.parquet", [measurement(row, "accuracy", accuracy, images, "dev", {})], ROWS)
            write_predictions(folder / "predictions.parquet", [])
    listed = list_results(store, None, None, "accuracy")
    assert {row["key"]: row["judged"] for row in listed} == {"first": 2, "grown": 1}
