"""Average precision against scikit-learn, with ties; of retrieval in blocks, and of several labels per image."""

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import average_precision_score

from ray_jobs.evaluation import average_precision
from ray_jobs.evaluation.average_precision import multi_label, retrieval


def test_retrieval_is_scikit_learns_average_precision_of_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several images per block, equal images among them; the last class has one image, which has no answer."""
    rng = np.random.default_rng(0)
    labels = np.append(rng.integers(0, 4, 60), 9)
    features = (rng.normal(size=(61, 5)) + labels[:, None] / 4).astype(np.float32)
    features[10:20] = features[20:30]
    monkeypatch.setattr(average_precision, "BLOCK", 7 * 61)
    found = retrieval(features, labels)
    directions = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float64)
    similar = np.round(directions @ directions.T, 5)
    assert np.isnan(found[-1]) and not np.isnan(found[:-1]).any()
    for query in range(60):
        others = np.arange(61) != query
        expected = average_precision_score((labels == labels[query])[others], similar[query, others])
        assert found[query] == pytest.approx(expected, abs=1e-6)
    far = retrieval(np.eye(4, dtype=np.float32)[labels[:60]] * 3, labels[:60])
    np.testing.assert_array_equal(far, np.ones(60))


def test_several_labels_are_scikit_learns_macro_average() -> None:
    """Over the classes that an image has; images without labels are left out, as scikit-learn has to be told."""
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 20, (50, 6)).astype(np.float32)
    lists = [None if i == 3 else sorted(rng.permutation(5)[: i % 4].tolist()) for i in range(50)]
    truth = np.array([[number in (found or []) for number in range(5)] for found in lists])
    kept = truth.any(axis=1)
    expected = average_precision_score(truth[kept], scores[kept, :5], average="macro")
    given = pa.array([[4], *lists], pa.list_(pa.int32()))[1:]  # as a filter may leave it: not from 0 on
    assert multi_label(scores, given) == pytest.approx(expected, abs=1e-9)
    assert multi_label(scores, pa.array([None, []] * 25, pa.list_(pa.int32()))) is None
