"""Scenes: pure functions of seed and number, whose boxes can be measured in the pixels."""

from typing import Any

import numpy as np
import pytest

from pipelines.files.sources import source_files
from pipelines.spec import ScenesSource
from ray_jobs.data.boxes import Box
from ray_jobs.sources import catalog
from ray_jobs.sources.archives.entries import Listing
from ray_jobs.sources.readers import digits, scenes

FIGURES = ("shapes", "digits")


def drawn(**fields: Any) -> tuple[ScenesSource, dict[str, str], Listing]:
    source = ScenesSource.model_validate({"kind": "scenes", "images": 150, "dev_images": 5, "test_images": 5} | fields)
    files = {name: str(path) for name, path in source_files(source).items()}
    return source, files, catalog.listing(source, files)


def boxes_of(listing: Listing) -> list[list[Box]]:
    return [[Box(**box) for box in boxes] for boxes in listing.entries["boxes"].to_pylist()]


@pytest.mark.parametrize("figures", FIGURES)
def test_a_box_is_where_the_pixels_differ_from_the_background(figures: str) -> None:
    source, files, listing = drawn(figures=figures, max_count=1)
    counts = set()
    for image, boxes in zip(scenes.rows(source, files, range(160)), boxes_of(listing), strict=True):
        counts.add(len(boxes))
        corners = [tuple(image[y, x]) for y in (0, -1) for x in (0, -1)]
        distance = np.abs(image.astype(int) - max(corners, key=corners.count)).sum(axis=2)
        if boxes:
            y, x = np.nonzero(distance > 0.5 * distance.max())
            seen = x.min(), y.min(), x.max() + 1, y.max() + 1
            assert np.abs(np.array(seen) - boxes[0][:4]).max() <= 1.0, (seen, boxes)
        else:
            assert not distance.any()
    assert counts == {0, 1}


@pytest.mark.parametrize("figures", FIGURES)
def test_objects_differ_and_hide_only_a_part_of_each_other(figures: str) -> None:
    source, files, listing = drawn(figures=figures)
    some = boxes_of(listing)
    assert {box.label for boxes in some for box in boxes} == set(range(len(listing.class_names)))
    assert {len(boxes) for boxes in some} == {0, 1, 2, 3, 4, 5}
    sides = [max(box.x2 - box.x1, box.y2 - box.y1) for boxes in some for box in boxes]
    assert min(sides) < 13 and 28 < max(sides) <= 33
    for boxes in some:
        for number, box in enumerate(boxes):
            assert all(scenes._covered(box, other) <= scenes.COVERED for other in boxes[:number])
    rows = listing.entries.to_pylist()
    assert [row["labels"] for row in rows] == [sorted({box.label for box in boxes}) for boxes in some]
    again = [*scenes.rows(source, files, [3, 7])]
    assert np.array_equal(again[1], next(scenes.rows(source, files, [7])))
    assert not np.array_equal(again[0], next(scenes.rows(source.model_copy(update={"seed": 1}), files, [3])))


def test_the_objects_of_a_split_are_of_that_split_of_the_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With digits that are full in train, tall in dev and wide in test, so are all objects there."""
    _, files, _ = drawn(max_count=1)
    images, labels, keys = digits.read(digits._file(files))
    splits = digits.listing(None, files).entries["split"].to_pylist()
    pixels = np.zeros_like(images)
    for row, split in enumerate(splits):
        pixels[row, : 4 if split == "test" else 8, : 4 if split == "dev" else 8] = 255
    monkeypatch.setattr(digits, "read", lambda path: (pixels, labels, keys))
    monkeypatch.setattr(digits, "assign_splits", lambda *given: splits)
    scenes._figures.cache_clear()
    _, _, listing = drawn(max_count=1, dev_images=40, test_images=40)
    scenes._figures.cache_clear()
    shapes = {"train": (1, 1), "dev": (1, 2), "test": (2, 1)}
    for split, boxes in zip(listing.entries["split"].to_pylist(), boxes_of(listing), strict=True):
        for box in boxes:
            wide, tall = shapes[split]
            assert (box.x2 - box.x1) / (box.y2 - box.y1) == pytest.approx(wide / tall, rel=0.15)
