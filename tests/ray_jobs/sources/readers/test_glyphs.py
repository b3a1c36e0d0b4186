"""Glyphs: what classes there are, and that an image depends on its number alone."""

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from pipelines.files.sources import source_files
from pipelines.spec import DigitsSource, GlyphSource
from ray_jobs.sources.readers import digits
from ray_jobs.sources.readers.glyphs import GlyphClass, find_fonts, glyph_classes, render

pytestmark = pytest.mark.slow  # thousands of glyphs are drawn
FONTS = find_fonts(source_files(GlyphSource(kind="glyphs")))


@pytest.fixture(scope="module")
def classes() -> list[GlyphClass]:
    return glyph_classes(FONTS)


def outline(font, character: str) -> np.ndarray:
    """The glyph's ink stretched to 32x32, drawn here anew: [1024] bool."""
    canvas = Image.new("L", (120, 120))
    ImageDraw.Draw(canvas).text((40, 40), character, fill=255, font=font)
    return np.asarray(canvas.crop(canvas.getbbox()).resize((32, 32), Image.Resampling.BILINEAR)).ravel() > 127


def loaded(path) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), 40, layout_engine=ImageFont.Layout.BASIC)


def test_classes_are_many_ordered_and_drawn_by_eight_fonts_or_more(classes: list[GlyphClass]) -> None:
    assert 600 <= len(classes) <= 800
    characters = [glyph_class.character for glyph_class in classes]
    assert characters == sorted(set(characters))
    assert all(len(glyph_class.fonts) >= 8 for glyph_class in classes)
    assert not any(character.isdigit() for character in characters)
    assert {"U+0041 LATIN CAPITAL LETTER A", "U+0416 CYRILLIC CAPITAL LETTER ZHE"} <= {c.name for c in classes}


def test_the_order_of_fonts_changes_no_class(classes: list[GlyphClass]) -> None:
    again = glyph_classes(FONTS[::-1])
    assert [(c.name, set(c.fonts)) for c in again] == [(c.name, set(c.fonts)) for c in classes]


def test_no_two_classes_have_the_same_outline_and_none_is_a_digits(classes: list[GlyphClass]) -> None:
    digit_outlines = np.stack([outline(loaded(path), digit) for path in FONTS for digit in "0123456789"])
    for path in FONTS:
        font = loaded(path)
        having = [c for c in classes if path in c.fonts]
        masks = {(font.getmask(c.character).size, bytes(font.getmask(c.character))) for c in having}
        assert len(masks) == len(having)
        for glyph_class in having:
            ours = outline(font, glyph_class.character)
            overlap = (digit_outlines & ours).sum(1) / (digit_outlines | ours).sum(1)
            assert overlap.max() <= 0.7 and ours.mean() <= 0.86, glyph_class.name


@pytest.mark.parametrize("gone", ["O", "o", "l", "I", "ı", "ǀ", "З", "ο", "б", "Α", "А"])
def test_lookalikes_of_digits_and_second_copies_of_a_letter_are_no_classes(
    classes: list[GlyphClass], gone: str
) -> None:
    assert gone not in {glyph_class.character for glyph_class in classes}


def test_an_image_depends_on_its_number_only(classes: list[GlyphClass]) -> None:
    images, labels = render(classes, 7, range(300))
    for part in (range(100), range(100, 300), [250, 3, 3]):
        again, labels_again = render(classes, 7, part)
        np.testing.assert_array_equal(again, images[list(part)])
        np.testing.assert_array_equal(labels_again, labels[list(part)])
    assert (render(classes, 8, range(300))[0] != images).any(axis=(1, 2, 3)).mean() > 0.99


def test_classes_are_balanced_and_images_differ(classes: list[GlyphClass]) -> None:
    images, labels = render(classes, 0, range(2 * len(classes)))
    assert images.shape == (2 * len(classes), 8, 8, 1) and images.dtype == np.uint8
    np.testing.assert_array_equal(np.bincount(labels), np.full(len(classes), 2))
    assert len(np.unique(images, axis=0)) > 0.99 * len(images)


def test_images_look_like_digits_by_their_ink(classes: list[GlyphClass]) -> None:
    glyphs, _ = render(classes, 0, range(2000))
    written, _, _ = digits.read(source_files(DigitsSource(kind="digits"))["digits.csv.gz"])
    assert set(np.unique(glyphs)) == set(np.unique(written))  # the same 17 grey values
    assert abs(glyphs.mean() - written.mean()) < 0.1 * written.mean()
    rows, digit_rows = (images.mean(axis=(0, 2, 3)) for images in (glyphs, written))
    assert np.abs(rows - digit_rows).max() < 0.25 * digit_rows.mean()  # all eight rows are filled
    assert (glyphs.max(axis=(1, 2, 3)) >= 128).mean() > 0.98 and glyphs.max(axis=(1, 2, 3)).min() > 0
