"""AP is COCO's: of pycocotools, of faster-coco-eval, and of pycocotools on images that are repeated as weights say."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import faster_coco_eval
import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ray_jobs.data.boxes import ANY_CLASS
from ray_jobs.detection.average_precision import (
    Boxes,
    Detected,
    average_precisions,
    class_ap,
    match,
    mean_ap,
    precisions,
)

CLASSES, SIDE = 3, 200
NAMES = ("AP", "AP50", "AP75", "AP small", "AP medium", "AP large")


def scenes(count: int, seed: int = 0) -> tuple[list[Boxes], list[Detected]]:
    """Boxes of all sizes, some ignored, and detections: moved boxes, twice, of other classes, and of nothing."""
    rng = np.random.default_rng(seed)
    truths, found = [], []
    for _ in range(count):
        number = rng.integers(0, 6)
        corners, sides = rng.uniform(0, SIDE / 2, (number, 2)), SIDE / 2 * rng.uniform(0.05, 1, (number, 2)) ** 2
        boxes, classes = np.hstack([corners, corners + sides]), rng.integers(0, CLASSES, number)
        truths.append(Boxes(boxes, classes, rng.random(number) < 0.15))
        moved = np.repeat(boxes, 2, axis=0) + rng.normal(0, 0.08, (2 * number, 4)) * np.tile(np.repeat(sides, 2, 0), 2)
        nothing = rng.uniform(0, SIDE / 2, (2, 4)) + np.array([0, 0, SIDE / 4, SIDE / 4])
        all_boxes = np.vstack([moved, nothing])
        all_boxes[:, 2:] = np.maximum(all_boxes[:, :2] + 1, all_boxes[:, 2:])
        guessed = np.where(rng.random(2 * number) < 0.2, rng.integers(0, CLASSES, 2 * number), np.repeat(classes, 2))
        scores = rng.permutation(len(all_boxes)) / 16  # equal in different images only
        found.append(Detected(all_boxes, scores, np.append(guessed, rng.integers(0, CLASSES, 2))))
    return truths, found


def coco_files(truths: list[Boxes], found: list[Detected]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same in COCO's format."""

    def entry(image: int, box: Any, of_class: Any) -> dict[str, Any]:
        x1, y1, x2, y2 = map(float, box)
        return {"image_id": image, "category_id": int(of_class), "bbox": [x1, y1, x2 - x1, y2 - y1]}

    annotations = [
        entry(image, box, of_class) | {"iscrowd": int(ignored), "area": float((box[2] - box[0]) * (box[3] - box[1]))}
        for image, truth in enumerate(truths)
        for box, of_class, ignored in zip(*truth, strict=True)
    ]
    results = [
        entry(image, box, of_class) | {"score": float(score)}
        for image, each in enumerate(found)
        for box, score, of_class in zip(*each, strict=True)
    ]
    dataset = {
        "info": {},
        "images": [{"id": number, "width": SIDE, "height": SIDE} for number in range(len(truths))],
        "categories": [{"id": number, "name": str(number)} for number in range(CLASSES)],
        "annotations": [each | {"id": number + 1} for number, each in enumerate(annotations)],
    }
    return dataset, results


def peers(folder: Path, truths: list[Boxes], found: list[Detected]) -> list[Any]:
    """The evaluations of pycocotools and of faster-coco-eval."""
    dataset, results = coco_files(truths, found)
    (folder / "truths.json").write_text(json.dumps(dataset))
    evaluations = []
    with redirect_stdout(io.StringIO()):
        for coco, evaluator in ((COCO, COCOeval), (faster_coco_eval.COCO, faster_coco_eval.COCOeval_faster)):
            truth = coco(str(folder / "truths.json"))
            evaluation = evaluator(truth, truth.loadRes(results), iouType="bbox")
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            evaluations.append(evaluation)
    return evaluations


@pytest.mark.parametrize("count", [1, 60])
def test_it_is_that_of_pycocotools_and_of_faster_coco_eval(tmp_path: Path, count: int) -> None:
    truths, found = scenes(count)
    matches = match(truths, found, CLASSES)
    ours = average_precisions(matches)
    for theirs in peers(tmp_path, truths, found):
        expected = np.where(theirs.stats[:6] == -1, np.nan, theirs.stats[:6])
        assert [ours[name] for name in NAMES] == pytest.approx(expected, abs=1e-9, nan_ok=True)
        curves = theirs.eval["precision"][:, :, :, 0, -1]  # of all sizes, [thresholds, recalls, classes]
        for of_class, curve in zip(matches["all"], np.moveaxis(curves, 2, 0), strict=True):
            assert precisions(of_class) == pytest.approx(np.where(curve == -1, np.nan, curve), abs=1e-9, nan_ok=True)
    assert count == 1 or 0.1 < ours["AP"] < 0.9


def test_weights_count_images_as_often_as_they_say(tmp_path: Path) -> None:
    truths, found = scenes(40)
    matches = match(truths, found, CLASSES)["all"]
    for seed in range(3):
        weights = np.random.default_rng(seed).multinomial(40, [1 / 40] * 40)
        repeated = np.repeat(np.arange(40), weights)
        theirs, _ = peers(tmp_path, [truths[place] for place in repeated], [found[place] for place in repeated])
        assert mean_ap(matches, weights.astype(float)) == pytest.approx(theirs.stats[0], abs=1e-9)


def test_a_class_without_boxes_leaves_the_mean() -> None:
    box, one = np.array([[10.0, 10.0, 50.0, 50.0]]), np.array([0])
    truths = [Boxes(box, one, np.array([False])), Boxes(box[:0], one[:0], np.zeros(0, bool))]
    found = [Detected(box, np.array([0.9]), one), Detected(box, np.array([0.8]), one + 1)]
    matches = match(truths, found, CLASSES)["all"]
    assert np.isnan(class_ap(matches[1])).all() and np.isnan(class_ap(matches[2])).all()
    assert mean_ap(matches) == pytest.approx(1.0)
    assert np.isnan(mean_ap(matches, np.array([0.0, 2.0])))


def test_nothing_detected_is_an_ap_of_zero() -> None:
    truths, found = scenes(5)
    nothing = [Detected(*(part[:0] for part in each)) for each in found]
    assert mean_ap(match(truths, nothing, CLASSES)["all"]) == 0.0
    assert np.isnan([*average_precisions(match(nothing_there(5), found, 0)).values()]).all()


def nothing_there(count: int) -> list[Boxes]:
    return [Boxes(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0, bool))] * count


def test_a_region_without_a_class_is_ignored_for_every_class() -> None:
    """As if it were there once for each class."""
    truths, found = scenes(40)
    any_class = [truth._replace(classes=np.where(truth.ignored, ANY_CLASS, truth.classes)) for truth in truths]
    repeated = []
    for boxes, classes, ignored in truths:
        order = np.concatenate([np.flatnonzero(~ignored), np.repeat(np.flatnonzero(ignored), CLASSES)])
        labels = np.concatenate([classes[~ignored], np.tile(np.arange(CLASSES), int(ignored.sum()))])
        repeated.append(Boxes(boxes[order], labels, ignored[order]))
    of_any, of_each = (average_precisions(match(some, found, CLASSES)) for some in (any_class, repeated))
    assert of_any == pytest.approx(of_each, nan_ok=True) and of_any != average_precisions(match(truths, found, CLASSES))
