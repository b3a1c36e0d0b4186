"""Drawn shapes: pure functions of seed and number, whose factors can be measured in the pixels."""

from collections import Counter

import numpy as np
import pytest
import scipy

from pipelines.spec import FACTORS, ShapesSource
from ray_jobs.sources import catalog
from ray_jobs.sources.readers import shapes


def source(**fields: object) -> ShapesSource:
    return ShapesSource(kind="shapes", images=300, dev_images=20, test_images=30, **fields)


def figure(image: np.ndarray) -> np.ndarray:
    """Where the figures are: what differs from the corner's colour by half of the most that anything does."""
    distance = np.abs(image.astype(int) - image[0, 0].astype(int)).sum(2)
    return distance > distance.max() / 2


def test_the_listing_is_balanced_enough_and_its_labels_are_the_drawn_factors() -> None:
    given = source(label="colour")
    found = catalog.listing(given, {})
    assert found.class_names == FACTORS["colour"]
    rows = found.entries.to_pylist()
    assert Counter(row["split"] for row in rows) == {"train": 300, "dev": 20, "test": 30}
    assert min(Counter(row["label"] for row in rows).values()) > 30
    for row in rows[::50]:
        assert row["label"] == shapes.render(given, row["offset"])[1]["colour"]


def test_an_image_depends_on_seed_and_number_alone() -> None:
    numbers = [17, 3, 299]
    images = list(shapes.rows(source(), {}, numbers))
    for label in FACTORS:
        fields = {"max_count": 5} if label == "count" else {}
        again = list(shapes.rows(source(label=label, **fields), {}, numbers[::-1]))[::-1]
        assert all(image.shape == (64, 64, 3) and image.dtype == np.uint8 for image in again)
        assert label == "count" or all(np.array_equal(a, b) for a, b in zip(images, again, strict=True))
    assert not np.array_equal(images[0], next(shapes.rows(source(seed=1), {}, [17])))
    assert not np.array_equal(images[0], images[1])


def test_position_count_and_scale_are_in_the_pixels() -> None:
    given = source(label="count", max_count=9, resolution=96)
    sizes: dict[int, list[float]] = {}
    for number in range(120):
        image, factors = shapes.render(given, number)
        labelled, found = scipy.ndimage.label(figure(image), np.ones((3, 3)))
        assert found == factors["count"] + 1
        if FACTORS["shape"][factors["shape"]] == "tee":
            sizes.setdefault(factors["scale"], []).append((labelled > 0).sum() / found)
    small, large = min(sizes), max(sizes)
    assert max(sizes[small]) < min(sizes[large])
    for number in range(60):
        image, factors = shapes.render(source(label="position", resolution=96), number)
        y, x = scipy.ndimage.center_of_mass(figure(image))
        assert (y // 32) * 3 + x // 32 == factors["position"]


def test_colour_is_in_the_pixels() -> None:
    import colorsys

    for number in range(60):
        image, factors = shapes.render(source(label="colour"), number)
        inside = scipy.ndimage.binary_erosion(figure(image), iterations=2)
        if not inside.any():
            continue
        hue = colorsys.rgb_to_hsv(*np.median(image[inside], 0) / 255)[0]
        assert round(hue * 6) % 6 == factors["colour"]


def test_every_shape_looks_different_at_every_orientation() -> None:
    """Each figure of the test's own drawing, turned, overlaps no other one as it does itself."""
    from PIL import Image, ImageDraw

    drawn = {}
    for shape, outline in zip(FACTORS["shape"], shapes._OUTLINES, strict=True):
        assert np.hypot(*outline.T).max() == pytest.approx(1)
        for turn in range(8):
            angle = turn * np.pi / 4
            turned = outline @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
            canvas = Image.new("1", (96, 96))
            ImageDraw.Draw(canvas).polygon([tuple(point) for point in 48 + 44 * turned], fill=1)
            drawn[shape, turn] = np.asarray(canvas)
    keys = list(drawn)
    for a in keys:
        for b in keys:
            if a < b:
                overlap = (drawn[a] & drawn[b]).sum() / (drawn[a] | drawn[b]).sum()
                assert overlap < 0.9, (a, b)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label": "position", "max_count": 2}, "max_count: 2 figures have several positions"),
        ({"label": "count"}, "max_count: label count needs max_count 2 or more"),
    ],
)
def test_a_label_that_cannot_be_told_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source(**fields)
