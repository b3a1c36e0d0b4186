"""Letters of all scripts as 8x8 images: pretraining data that every machine with matplotlib already has.

In: the Unicode text fonts in matplotlib's wheel. Out: about 650 balanced classes of grey 8x8 images, made in the same
way as scikit-learn's digits (NIST's 32x32 bitmaps counted in 4x4 blocks). They contain no digit and nothing that looks
like one, so that few-shot accuracy on digits measures transfer.

    fonts = find_fonts({name: Path(path) for name, path in source_files(GlyphSource(kind="glyphs")).items()})
    classes = glyph_classes(fonts)
    images, labels = render(classes, seed=0, indices=range(1000))

Image i is a pure function of (classes, seed, i): every machine renders the same bytes for any range.
"""

from __future__ import annotations

import math
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from pipelines.spec import GlyphSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources import counts_to_uint8
from ray_jobs.sources.archives.entries import Files, Listing, of_rows
from vit_model.errors import UserError

# The other fonts of the 40 in the wheel are not Unicode text fonts: LastResort has a placeholder box for every code
# point, cmex/cmmi/cmsy encode symbols as letters, STIXSiz*/STIXNonUni*/*Display are fragments.
FONT_NAMES = (
    *("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf", "DejaVuSans-BoldOblique.ttf"),
    *("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf"),
    *("DejaVuSansMono-Oblique.ttf", "DejaVuSansMono-BoldOblique.ttf"),
    *("DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf", "DejaVuSerif-Italic.ttf", "DejaVuSerif-BoldItalic.ttf"),
    *("STIXGeneral.ttf", "STIXGeneralBol.ttf", "STIXGeneralItalic.ttf", "STIXGeneralBolIta.ttf"),
    *("cmr10.ttf", "cmb10.ttf", "cmti10.ttf", "cmss10.ttf", "cmtt10.ttf"),
)
LETTERS = ("Lu", "Ll", "Lo")  # upper case, lower case, no case; Lm are small copies of other letters
MIN_FONTS = 8  # fewer fonts show a class in too few shapes
MAX_DIGIT_OVERLAP = 0.7  # intersection over union with a digit; letters above it look like the digit
# fraction of its box that ink may fill; above it, a letter is a bare stroke, like a handwritten 1
MAX_FILL = 0.85

FONT_PIXELS = 40
FIT_PIXELS = 56  # longer side of the distorted glyph, before it is scaled to its final 32 rows
CANVAS_PIXELS = 60
GRID = 32  # rows and columns of the bitmap that is counted in blocks
BLOCK = 4
_SEED_PURPOSE = 0x676C7970  # "glyp": separates this random stream from others with the same seed


class GlyphClass(NamedTuple):
    """One class: its name ("U+0416 CYRILLIC CAPITAL LETTER ZHE"), its character, the fonts that have it."""

    name: str
    character: str
    fonts: tuple[Path, ...]


_RENDERED = 256  # images at a time


def listing(source: GlyphSource, files: Files) -> Listing:
    """List images 0, 1, ... of the classes in turn: first train, then dev."""
    names = [glyph.name for glyph in _classes(files)]
    splits = ["train"] * source.images + ["dev"] * source.dev_images
    keys = [f"glyph-{number:07d}" for number in range(len(splits))]
    entries = of_rows(keys, [number % len(names) for number in range(len(splits))], splits, 64)
    return Listing(tuple(names), entries, ImageSize(height=8, width=8, channels=1))


def rows(source: GlyphSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the images [8, 8, 1] with these numbers."""
    for start in range(0, len(numbers), _RENDERED):
        yield from render(_classes(files), source.seed, numbers[start : start + _RENDERED])[0]


def _classes(files: Files) -> list[GlyphClass]:
    return _classes_of(tuple(sorted(files.items())))


@cache
def _classes_of(files: tuple[tuple[str, str], ...]) -> list[GlyphClass]:
    """Return the classes, cached per process: it takes a second, and a worker renders several shards."""
    return glyph_classes(find_fonts({name: Path(path) for name, path in files}))


def find_fonts(files: Mapping[str, Path]) -> list[Path]:
    """Return the usable fonts of matplotlib's font files, in the order of `FONT_NAMES`.

    Raises:
        UserError: one of them is missing.
    """
    if missing := [name for name in FONT_NAMES if name not in files]:
        raise UserError(f"matplotlib: missing fonts: {', '.join(missing)}. Reinstall matplotlib")
    return [files[name] for name in FONT_NAMES]


def glyph_classes(fonts: Sequence[Path]) -> list[GlyphClass]:
    """Return the classes of `fonts`, by code point; takes about a second for matplotlib's fonts.

    A class is a base letter (its own NFD form) that at least 8 fonts have. Letters with the same bitmap in some font
    are one class, drawn as its first letter (Latin A, Greek Alpha, Cyrillic A). A class is dropped if one of its
    letters, with its ink stretched to a square, overlaps a digit by more than 0.7 in any two fonts, or fills the square
    as a bare stroke does.
    """
    letters = {code: letter_fonts for code, letter_fonts in _letters(fonts).items() if len(letter_fonts) >= MIN_FONTS}
    alike = _digit_lookalikes(letters, fonts)
    groups = _merge_identical(letters)
    return [
        GlyphClass(f"U+{code:04X} {unicodedata.name(chr(code))}", chr(code), tuple(letters[code]))
        for code, members in sorted(groups.items())
        if not alike.intersection(members)
    ]


def render(
    classes: Sequence[GlyphClass], seed: int, indices: Sequence[int]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Render the images with the numbers `indices`: [n, 8, 8, 1] (0 is background, 255 full ink), and labels [n].

    Image i has class i modulo the number of classes, so any sequence of that many images is balanced.
    """
    bitmaps = np.empty((len(indices), GRID, GRID), np.uint8)
    levels = np.empty((len(indices), 1, 1), np.float64)
    labels = np.asarray(indices, np.int64) % len(classes)
    for row, index in enumerate(indices):
        rng = np.random.default_rng([seed, _SEED_PURPOSE, index])
        glyph_class = classes[labels[row]]
        font = glyph_class.fonts[rng.integers(len(glyph_class.fonts))]
        bitmaps[row] = _boxed(_distorted(_drawn(font, glyph_class.character), rng))
        levels[row] = rng.uniform(64, 192)
    blocks = (bitmaps > levels).reshape(-1, GRID // BLOCK, BLOCK, GRID // BLOCK, BLOCK)
    counts = blocks.sum((2, 4))
    return counts_to_uint8(counts)[..., None], labels


def _letters(fonts: Sequence[Path]) -> dict[int, list[Path]]:
    """Return base letters by code point, with the fonts that have them."""
    from fontTools.ttLib import TTFont

    letters: dict[int, list[Path]] = defaultdict(list)
    for font in fonts:
        with TTFont(font, lazy=True) as table:
            codes = table.getBestCmap()
        for code in codes:
            # The cm fonts follow Unicode only in ASCII: their table has Gamma at U+00A1.
            if (code < 128 or not font.name.startswith("cm")) and _is_base_letter(chr(code)):
                letters[code].append(font)
    return dict(sorted(letters.items()))


def _is_base_letter(character: str) -> bool:
    return unicodedata.category(character) in LETTERS and unicodedata.normalize("NFD", character) == character


def _merge_identical(letters: dict[int, list[Path]]) -> dict[int, list[int]]:
    """Return groups of letters that are linked by an identical bitmap in some font, by their lowest code point."""
    first: dict[tuple[Path, tuple[int, int], bytes], int] = {}
    parent = {code: code for code in letters}

    def root(code: int) -> int:
        while parent[code] != code:
            code = parent[code]
        return code

    for code, fonts in letters.items():
        for font in fonts:
            drawn = _drawn(font, chr(code))
            same = first.setdefault((font, drawn.size, drawn.tobytes()), code)
            low, high = sorted((root(same), root(code)))
            parent[high] = low
    groups: dict[int, list[int]] = defaultdict(list)
    for code in letters:
        groups[root(code)].append(code)
    return groups


def _digit_lookalikes(letters: dict[int, list[Path]], fonts: Sequence[Path]) -> set[int]:
    """Return letters with a stretched outline that overlaps a digit of any font too much, and bare strokes."""
    digits = np.stack([_stretched(font, digit) for font in fonts for digit in "0123456789"])
    alike: set[int] = set()
    for code, letter_fonts in letters.items():
        outlines = np.stack([_stretched(font, chr(code)) for font in letter_fonts])
        common = np.bitwise_count(outlines[:, None] & digits).sum(2)
        union = np.bitwise_count(outlines[:, None] | digits).sum(2)
        fill = np.bitwise_count(outlines).sum(1) / GRID**2
        if (common / union).max() > MAX_DIGIT_OVERLAP or fill.max() > MAX_FILL:
            alike.add(code)
    return alike


def _stretched(font: Path, character: str) -> NDArray[np.uint64]:
    """Return the glyph's ink, stretched to 32x32 and thresholded, as 1,024 bits in 16 words."""
    drawn = _drawn(font, character).resize((GRID, GRID), Image.Resampling.BILINEAR)
    return np.packbits(np.asarray(drawn) > 127).view(np.uint64)


@lru_cache(maxsize=64)
def _font(path: Path) -> ImageFont.FreeTypeFont:
    # The basic layout engine is always available. Raqm is not, and would shape some scripts differently.
    return ImageFont.truetype(str(path), FONT_PIXELS, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=16384)  # all pairs of a class and a font: 20 MB that halve the time of rendering
def _drawn(font: Path, character: str) -> Image.Image:
    """Draw the glyph in grey, cropped to its ink."""
    left, top, right, bottom = _font(font).getbbox(character)
    image = Image.new("L", (math.ceil(right - left) + 4, math.ceil(bottom - top) + 4))
    ImageDraw.Draw(image).text((2 - left, 2 - top), character, fill=255, font=_font(font))
    ink = image.getbbox()
    if ink is None:
        raise UserError(f"{font.name} draws nothing for {character!r}: damaged font")
    return image.crop(ink)


def _distorted(glyph: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Rotate and shear the glyph, and change its aspect ratio; in 4 of 10 cases make its stroke thicker or thinner."""
    angle, shear, log_aspect = rng.normal(0.0, (0.13, 0.25, 0.15))
    stroke = rng.random()
    cos, sin, wide = math.cos(angle), math.sin(angle), math.exp(log_aspect / 2)
    rotation = np.array([[cos, -sin], [sin, cos]])
    matrix = rotation @ np.array([[wide, shear / wide], [0.0, 1 / wide]])
    matrix *= FIT_PIXELS / (np.abs(matrix) @ glyph.size).max()
    inverse = np.linalg.inv(matrix)
    offset = np.array(glyph.size) / 2 - inverse @ np.full(2, CANVAS_PIXELS / 2)
    coefficients = (*inverse[0], offset[0], *inverse[1], offset[1])
    size = (CANVAS_PIXELS, CANVAS_PIXELS)
    moved = glyph.transform(size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
    if stroke < 0.2:
        return moved.filter(ImageFilter.MaxFilter(3))
    if stroke < 0.4:
        thin = moved.filter(ImageFilter.MinFilter(3))
        # The hairlines of a light serif font would vanish and leave fragments.
        if np.asarray(thin).sum(dtype=np.int64) > 0.5 * np.asarray(moved).sum(dtype=np.int64):
            return thin
    return moved


def _boxed(image: Image.Image) -> NDArray[np.uint8]:
    """Scale the ink to 32 rows, and its width by aspect within 4..30 columns, centred: [32, 32]."""
    ink = image.point(_INK).getbbox()
    assert ink is not None
    width = min(30, max(4, round(GRID * (ink[2] - ink[0]) / (ink[3] - ink[1]))))
    left = (GRID - width) // 2
    boxed = np.zeros((GRID, GRID), np.uint8)
    boxed[:, left : left + width] = np.asarray(image.resize((width, GRID), Image.Resampling.BILINEAR, ink))
    return boxed


_INK = [0] * 128 + [255] * 128  # a pixel is ink if it is at least half covered
