"""Each detection and each box of a planted scene gets its name."""

import numpy as np

from ray_jobs.detection.average_precision import Boxes, Detected
from ray_jobs.detection.mistakes import named

TRUTH = Boxes(
    np.array([[0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10], [60, 60, 90, 90]], float),
    np.array([0, 1, 0, 0]),
    np.array([False, False, False, True]),
)
PLANTED = [  # box, score, class, name
    ((0, 0, 10, 10), 0.9, 0, "right"),
    ((1, 0, 11, 10), 0.8, 0, "double"),
    ((20, 0, 30, 10), 0.7, 0, "class"),
    ((46, 0, 56, 10), 0.6, 0, "place"),
    ((62, 62, 70, 70), 0.55, 1, "ignored"),
    ((0, 40, 10, 50), 0.5, 1, "background"),
    ((40, 0, 50, 10), 0.2, 0, None),
]


def test_every_mistake_has_its_name() -> None:
    order = np.random.default_rng(0).permutation(len(PLANTED))
    boxes, scores, classes, _ = zip(*(PLANTED[number] for number in order), strict=True)
    found = Detected(np.array(boxes, float), np.array(scores), np.array(classes))
    result = named(TRUTH, found)
    assert [PLANTED[order[number]][3] for number in result.shown] == result.kinds
    assert result.is_missed.tolist() == [False, True, True, False]


def test_the_best_of_two_detections_of_a_box_is_right() -> None:
    """Also if the other one overlaps more; and a box is found once."""
    found = Detected(np.array([[0, 0, 10, 10], [0, 0, 10, 7]], float), np.array([0.6, 0.9]), np.array([0, 0]))
    result = named(TRUTH, found)
    assert (result.shown.tolist(), result.kinds) == ([1, 0], ["right", "double"])


def test_nothing_is_nothing() -> None:
    none = Boxes(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0, bool))
    found = Detected(np.zeros((0, 4)), np.zeros(0), np.zeros(0, int))
    assert named(none, found).kinds == [] and named(TRUTH, found).is_missed.tolist() == [True, True, True, False]
    one = Detected(np.array([[0, 0, 5, 5]], float), np.array([0.5]), np.array([0]))
    assert named(none, one).kinds == ["background"]
