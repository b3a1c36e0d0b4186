"""FCOS computes what torchvision's does, and trains: see torchvision_fcos.py for how its numbers were made."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.vit_model.detection.case import BOXES, CHANNELS, CLASSES, LABELS, SIDE, STRIDES, maps, weight
from vit_model.detection.fcos import FCOSHead, Outputs, Places, Truth, assign, decode, detect, loss

TORCHVISION = np.load(Path(__file__).with_name("torchvision_fcos.npz"))
SHAPES = [(SIDE // stride, SIDE // stride) for stride in STRIDES]
TOWERS = {"class_tower": "classification_head.conv", "box_tower": "regression_head.conv"}
LAYERS = {"classes": "classification_head.cls_logits", "sides": "regression_head.bbox_reg"}
THEIRS = TOWERS | LAYERS | {"centred": "regression_head.bbox_ctrness"}


@pytest.fixture
def head() -> FCOSHead:
    """Our head with the weights of torchvision's."""
    made = FCOSHead(CHANNELS, CLASSES)
    named = {name: name.partition(".") for name in made.state_dict()}
    made.load_state_dict(
        {
            name: weight(f"{THEIRS[layer]}.{rest}", tuple(made.get_parameter(name).shape))
            for name, (layer, _, rest) in named.items()
        }
    )
    return made


@pytest.fixture
def corners() -> Places:
    """The places of torchvision's anchors: the upper left corners of their squares."""
    places = Places.of(SHAPES, STRIDES)
    return places._replace(centres=places.centres - places.strides[:, None] / 2)


def truth(boxes: tuple[tuple[int, ...], ...], labels: tuple[int, ...], ignored: tuple[int, ...] = ()) -> Truth:
    is_ignored = torch.zeros(len(boxes), dtype=torch.bool)
    is_ignored[list(ignored)] = True
    return Truth(torch.tensor(boxes).float().reshape(-1, 4), torch.tensor(labels, dtype=torch.long), is_ignored)


TRUTHS = [truth(boxes, labels) for boxes, labels in zip(BOXES, LABELS, strict=True)]


def test_the_loss_is_torchvisions(head: FCOSHead, corners: Places) -> None:
    ours = loss(head(maps()), corners, TRUTHS)
    theirs = [TORCHVISION[f"loss.{name}"] for name in ("classification", "bbox_regression", "bbox_ctrness")]
    np.testing.assert_allclose([each.item() for each in ours], theirs, rtol=1e-5)


def test_the_detections_are_torchvisions(head: FCOSHead, corners: Places) -> None:
    with torch.no_grad():
        found = detect(head(maps()), corners, SIDE, SIDE)
    for place, ours in enumerate(found):
        assert len(ours.scores) == 100
        np.testing.assert_allclose(ours.scores, TORCHVISION[f"scores{place}"], rtol=1e-5)
        np.testing.assert_allclose(ours.boxes, TORCHVISION[f"boxes{place}"], atol=1e-4)
        assert ours.classes.tolist() == TORCHVISION[f"labels{place}"].tolist()


def test_a_place_belongs_to_the_smallest_box_that_fits() -> None:
    places = Places.of([(8, 8), (4, 4)], [8, 16])
    boxes = ((0, 0, 64, 64), (8, 8, 40, 40), (10, 10, 22, 22))  # each in the one before
    assigned = assign(places, truth(boxes, (0, 1, 2)))
    for which, (x, y), stride, low, high in zip(assigned, places.centres, places.strides, *places[2:4], strict=True):
        fits = [
            number
            for number, (x1, y1, x2, y2) in enumerate(boxes)
            if x1 < x < x2
            and y1 < y < y2
            and max(abs(x - (x1 + x2) / 2), abs(y - (y1 + y2) / 2)) < 1.5 * stride
            and low < max(x - x1, y - y1, x2 - x, y2 - y) < high
        ]
        assert which == (fits[-1] if fits else -1)
    assert set(assigned.tolist()) == {-1, 0, 1, 2}


def test_perfect_outputs_have_no_loss_of_boxes_and_are_found() -> None:
    places, image = Places.of(SHAPES, STRIDES), truth(BOXES[0][:3], LABELS[0][:3])
    assigned = assign(places, image)
    is_box = assigned >= 0
    boxes = image.boxes[assigned.clamp(min=0)]
    sides = torch.cat([places.centres - boxes[:, :2], boxes[:, 2:] - places.centres], dim=1) / places.strides[:, None]
    classes = torch.full((len(assigned), CLASSES), -20.0)
    classes[is_box, image.classes[assigned[is_box]]] = 20.0
    outputs = Outputs(
        classes[None], torch.where(is_box[:, None], sides, 0.0)[None], torch.full((1, len(assigned)), 20.0)
    )
    measured = loss(outputs, places, [image])
    assert measured.classes < 1e-6 and measured.boxes < 1e-5
    torch.testing.assert_close(decode(sides, places.centres, places.strides)[is_box], boxes[is_box])
    (found,) = detect(outputs, places, SIDE, SIDE)
    assert sorted(map(tuple, found.boxes.round().int().tolist())) == sorted(BOXES[0][:3])


def test_places_in_an_ignored_region_are_neither_right_nor_wrong(head: FCOSHead) -> None:
    places, outputs = Places.of(SHAPES, STRIDES), head(maps())
    everything = ((0, 0, SIDE, SIDE),)
    ignored = loss(outputs, places, [truth(everything, (0,), ignored=(0,))] * 2)
    assert [each.item() for each in ignored] == [0.0, 0.0, 0.0]
    boxes = ((3, 5, 30, 28),)
    within = loss(outputs, places, [truth(boxes + everything, (0, 0), ignored=(1,))] * 2)
    alone = loss(outputs, places, [truth(boxes, (0,))] * 2)
    assert 0 < within.classes < alone.classes and within[1:] == alone[1:]


def test_images_without_boxes_are_negatives_whose_gradients_are_finite() -> None:
    head = FCOSHead(CHANNELS, CLASSES, convs=1)
    head.initialise(torch.Generator().manual_seed(0))
    outputs = head(maps())
    assert abs(outputs.classes.sigmoid().mean() - 0.01) < 0.005
    sum(loss(outputs, Places.of(SHAPES, STRIDES), [truth((), ()), truth((), ())]), torch.zeros(())).backward()
    gradients = [each.grad for each in head.parameters() if each.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)
