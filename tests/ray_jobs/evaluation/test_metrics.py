"""Metrics that readers compute from predictions: scikit-learn's values, and intervals that cover the truth."""

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score

from pipelines.spec import Finetune
from ray_jobs.evaluation import metrics
from ray_jobs.evaluation.intervals import mean_interval
from ray_jobs.training.evaluators import evaluation

SKLEARN: dict[str, Callable[..., float]] = {
    "macro-F1": lambda labels, predictions: f1_score(labels, predictions, average="macro"),
    "balanced accuracy": balanced_accuracy_score,
}


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
@pytest.mark.parametrize("metric", metrics.COMPUTED, ids=lambda metric: metric.name)
def test_values_are_scikit_learns(metric: metrics.Metric) -> None:
    """With classes that have no images, and classes that are never predicted; an image's mean part is the metric."""
    rng = np.random.default_rng(0)
    labels = rng.choice([0, 1, 2, 3, 5, 9], 300)
    predictions = np.where(rng.random((4, 300)) < 0.7, labels, rng.choice([0, 1, 2, 7], (4, 300)))
    expected = [SKLEARN[metric.name](labels, draw) for draw in predictions]
    assert [metrics.value(metric, labels, draw) for draw in predictions] == pytest.approx(expected)
    assert metrics.contributions(metric, labels, predictions).mean(axis=1) == pytest.approx(expected)
    value, low, high = mean_interval(metrics.contributions(metric, labels, predictions))
    assert value == pytest.approx(np.mean(expected)) and 0 < low < value < high < 1


def test_a_search_selects_by_the_metric_that_it_names() -> None:
    rng = np.random.default_rng(0)
    labels, logits = rng.integers(0, 4, 50), rng.normal(size=(50, 4)).astype(np.float32)
    by_accuracy, *names = get_args(Finetune.model_fields["select_by"].annotation)
    assert by_accuracy == metrics.ACCURACY
    for name in names:
        results = evaluation(1, torch.from_numpy(logits), torch.from_numpy(labels), name)
        assert results.metrics == {name: pytest.approx(SKLEARN[name](labels, logits.argmax(axis=1)))}


@pytest.mark.parametrize("metric", metrics.COMPUTED, ids=lambda metric: metric.name)
def test_an_images_part_is_what_its_weight_changes(metric: metrics.Metric) -> None:
    """The derivative, against the difference that many copies of the other images leave: one image more."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, 50)
    predictions = rng.integers(0, 3, 50)
    (parts,) = metrics.contributions(metric, labels, predictions[None])
    before, copies = metrics.value(metric, labels, predictions), 2000
    many = [np.repeat(column, copies) for column in (labels, predictions)]
    for image in range(5):
        more = [np.append(column, column[image * copies]) for column in many]
        change = (metrics.value(metric, *more) - before) * len(more[0])
        assert change == pytest.approx(parts[image] - before, abs=1e-3), (
            "a class's part must be a smooth function of the counts of that class alone"
        )


@pytest.mark.parametrize("metric", metrics.COMPUTED, ids=lambda metric: metric.name)
def test_without_errors_the_interval_has_a_width(metric: metrics.Metric) -> None:
    labels = np.arange(100) % 5
    value, low, high = mean_interval(metrics.contributions(metric, labels, np.stack([labels, labels])))
    assert value == high == 1 and 0.9 < low < 1


@pytest.mark.slow
@pytest.mark.parametrize(("draws", "images", "right"), [(1, 300, 0.7), (5, 300, 0.9), (5, 1000, 0.97)])
def test_intervals_cover_the_truth(draws: int, images: int, right: float) -> None:
    """As often as those of accuracies do; classes have two sizes, and draws differ as in the quickstart."""
    rng = np.random.default_rng(2)
    shares = np.array([0.2, 0.2, 0.2, 0.2, 0.1, 0.1])
    odds = np.log(right / (1 - right)) + np.array([1, 0, 0, 0, 0, -1])

    def sample(n: int, times: int) -> tuple[Any, Any]:
        labels = rng.choice(6, n, p=shares)
        score = odds[labels] + rng.normal(0, 1, n) + rng.normal(0, 0.1 * (draws > 1), (times, 1))
        is_right = rng.random((times, n)) < 1 / (1 + np.exp(-score))
        return labels, np.where(is_right, labels, (labels + rng.integers(1, 6, (times, n))) % 6)

    labels, predictions = sample(200_000, 40)
    for metric in metrics.COMPUTED:
        truth = np.mean([metrics.value(metric, labels, draw) for draw in predictions])
        found = [mean_interval(metrics.contributions(metric, *sample(images, draws))) for _ in range(400)]
        assert 0.92 <= np.mean([low <= truth <= high for _, low, high in found]) <= 0.985


def test_retrieval_is_scikit_learns_average_precision_of_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several images per block, equal images among them; the last class has one image, which has no answer."""
    rng = np.random.default_rng(0)
    labels = np.append(rng.integers(0, 4, 60), 9)
    features = (rng.normal(size=(61, 5)) + labels[:, None] / 4).astype(np.float32)
    features[10:20] = features[20:30]
    monkeypatch.setattr(metrics, "BLOCK", 7 * 61)
    found = metrics.retrieval(features, labels)
    directions = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float64)
    similar = np.round(directions @ directions.T, 5)
    assert np.isnan(found[-1]) and not np.isnan(found[:-1]).any()
    for query in range(60):
        others = np.arange(61) != query
        expected = average_precision_score((labels == labels[query])[others], similar[query, others])
        assert found[query] == pytest.approx(expected, abs=1e-6)
    far = metrics.retrieval(np.eye(4, dtype=np.float32)[labels[:60]] * 3, labels[:60])
    np.testing.assert_array_equal(far, np.ones(60))


def test_the_interval_of_miou_is_that_of_a_bootstrap_of_images() -> None:
    """Contributions average to the mIoU of all pixels, also with a class that is in no mask."""
    rng = np.random.default_rng(0)
    confusions = np.stack(
        [rng.multinomial(400, rng.dirichlet([12, 2, 1, 0.5, 1, 6, 0.5, 0.5, 0, 0, 0, 0])) for _ in range(200)]
    ).reshape(200, 3, 4)
    counts = np.zeros((200, 4, 4), np.int64)
    counts[:, :3] = confusions
    pixels = metrics.Pixels(np.einsum("nkk->nk", counts), counts.sum(2), counts.sum(1))
    value, low, high = mean_interval(pixels.contributions("mIoU")[None])
    assert value == pytest.approx(metrics.mean_iou(counts.sum(0)))
    drawn = [metrics.mean_iou(counts[rng.integers(0, 200, 200)].sum(0)) for _ in range(2_000)]
    assert (low, high) == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=0.12 * (high - low))
