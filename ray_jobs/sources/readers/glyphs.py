"""Letters of all scripts as 8x8 images: data to pretrain on that every machine with matplotlib already has.

In: the Unicode text fonts inside matplotlib's wheel. Out: about 650 balanced classes of grey 8x8 images made
the way scikit-learn's digits were made (NIST's 32x32 bitmaps counted in 4x4 blocks), with no digit and
nothing that looks like one among them, so that few-shot accuracy on digits measures transfer.

    fonts = find_fonts({name: Path(path) for name, path in source_files(GlyphSource(kind="glyphs")).items()})
    classes = glyph_classes(fonts)
    images, labels = render(classes, seed=0, indices=range(1000))

Image i is a pure function of (classes, seed, i): any range can be rendered anywhere and has the same bytes.
"""

from __future__ import annotations

import math
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from pipelines.spec import GlyphSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources import counts_to_uint8
from ray_jobs.sources.archives.entries import Files, Listing, table
from vit_model.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image, ImageFont

# Of the 40 fonts in the wheel the rest are no Unicode text fonts: LastResort has a placeholder box for every
# code point, cmex/cmmi/cmsy encode symbols as if they were letters, STIXSiz*/STIXNonUni*/*Display are
# fragments.
FONT_NAMES = (
    *("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf", "DejaVuSans-BoldOblique.ttf"),
    *("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf"),
    *("DejaVuSansMono-Oblique.ttf", "DejaVuSansMono-BoldOblique.ttf"),
    *("DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf", "DejaVuSerif-Italic.ttf", "DejaVuSerif-BoldItalic.ttf"),
    *("STIXGeneral.ttf", "STIXGeneralBol.ttf", "STIXGeneralItalic.ttf", "STIXGeneralBolIta.ttf"),
    *("cmr10.ttf", "cmb10.ttf", "cmti10.ttf", "cmss10.ttf", "cmtt10.ttf"),
)
LETTERS = ("Lu", "Ll", "Lo")  # upper case, lower case, no case; Lm would be small copies of other letters
MIN_FONTS = 8  # fewer fonts show a class in too few shapes
MAX_DIGIT_OVERLAP = 0.7  # intersection over union with a digit, above which a letter counts as its look-alike
MAX_FILL = 0.85  # share of its box that ink may fill: more is a bare stroke, as many write 1

FONT_PIXELS = 40
FIT_PIXELS = 56  # the distorted glyph's longer side, before it is scaled to its final 32 rows
CANVAS_PIXELS = 60
GRID = 32  # rows and columns of the bitmap that is counted in blocks
BLOCK = 4
_SEED_PURPOSE = 0x676C7970  # "glyp": keeps this stream apart from others with the same seed


class GlyphClass(NamedTuple):
    """One class: its name ("U+0416 CYRILLIC CAPITAL LETTER ZHE"), its character, the fonts that have it."""

    name: str
    character: str
    fonts: tuple[Path, ...]


_RENDERED = 256  # images at a time


def listing(source: GlyphSource, files: Files) -> Listing:
    """Images 0, 1, ... of the classes in turn: first those of train, then those of dev."""
    names = [glyph.name for glyph in _classes(files)]
    entries = (
        {
            "key": f"glyph-{number:07d}",
            "label": number % len(names),
            "split": "train" if number < source.images else "dev",
            "file": "",
            "offset": number,
            "length": 64,
            "codec": "row",
        }
        for number in range(source.images + source.dev_images)
    )
    return Listing(tuple(names), table(entries), ImageSize(height=8, width=8, channels=1))


def rows(source: GlyphSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """The images [8, 8, 1] of these numbers."""
    for start in range(0, len(numbers), _RENDERED):
        yield from render(_classes(files), source.seed, numbers[start : start + _RENDERED])[0]


def _classes(files: Files) -> list[GlyphClass]:
    return _classes_of(tuple(sorted(files.items())))


@cache
def _classes_of(files: tuple[tuple[str, str], ...]) -> list[GlyphClass]:
    """Found once a process: it takes a second, and a worker renders several shards."""
    return glyph_classes(find_fonts({name: Path(path) for name, path in files}))


def find_fonts(files: Mapping[str, Path]) -> list[Path]:
    """The usable ones among matplotlib's font files, by name, in the order of `FONT_NAMES`.

    Raises UserError when one of them is missing.
    """
    if missing := [name for name in FONT_NAMES if name not in files]:
        raise UserError(f"matplotlib lacks the fonts {', '.join(missing)}: reinstall matplotlib")
    return [files[name] for name in FONT_NAMES]


def glyph_classes(fonts: Sequence[Path]) -> list[GlyphClass]:
    """The classes that `fonts` give, by code point; takes about a second for matplotlib's fonts.

    A base letter (its own NFD form) counts when at least 8 fonts have it. Letters with the same bitmap in
    some font are one class, drawn as its first letter (Latin A, Greek Alpha, Cyrillic A). A class goes when
    any of its letters, its ink stretched to a square, overlaps a digit by more than 0.7 in whichever two
    fonts, or fills it as a bare stroke does.
    """
    letters = {code: found for code, found in _letters(fonts).items() if len(found) >= MIN_FONTS}
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
    """Images [n, 8, 8, 1] (0 is background, 255 full ink) and labels [n] of the images numbered `indices`.

    Image i has class i modulo the number of classes, so every run of that many images is balanced.
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
    """Base letters by code point, with the fonts that have them."""
    from fontTools.ttLib import TTFont

    found: dict[int, list[Path]] = defaultdict(list)
    for font in fonts:
        with TTFont(font, lazy=True) as table:
            codes = table.getBestCmap()
        for code in codes:
            # The cm fonts are Unicode only in ASCII: above it their table says "Gamma" at U+00A1.
            if (code < 128 or not font.name.startswith("cm")) and _is_base_letter(chr(code)):
                found[code].append(font)
    return dict(sorted(found.items()))


def _is_base_letter(character: str) -> bool:
    return unicodedata.category(character) in LETTERS and unicodedata.normalize("NFD", character) == character


def _merge_identical(letters: dict[int, list[Path]]) -> dict[int, list[int]]:
    """Groups of letters linked by an identical bitmap in some font, under their lowest code point."""
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
    """Letters whose stretched outline overlaps some digit of some font too far, and bare strokes."""
    digits = np.stack([_stretched(font, digit) for font in fonts for digit in "0123456789"])
    alike: set[int] = set()
    for code, found in letters.items():
        outlines = np.stack([_stretched(font, chr(code)) for font in found])
        common = np.bitwise_count(outlines[:, None] & digits).sum(2)
        union = np.bitwise_count(outlines[:, None] | digits).sum(2)
        fill = np.bitwise_count(outlines).sum(1) / GRID**2
        if (common / union).max() > MAX_DIGIT_OVERLAP or fill.max() > MAX_FILL:
            alike.add(code)
    return alike


def _stretched(font: Path, character: str) -> NDArray[np.uint64]:
    """The glyph's ink stretched to 32x32 and thresholded, as 1,024 bits in 16 words."""
    drawn = _drawn(font, character).resize((GRID, GRID), Image.Resampling.BILINEAR)
    return np.packbits(np.asarray(drawn) > 127).view(np.uint64)


@lru_cache(maxsize=64)
def _font(path: Path) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    # The basic layout engine is always there; Raqm is not, and would shape some scripts differently.
    return ImageFont.truetype(str(path), FONT_PIXELS, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=16384)  # all pairs of a class and a font: about 20 MB, half the time of rendering
def _drawn(font: Path, character: str) -> Image.Image:
    """The glyph in grey, cropped to its ink."""
    left, top, right, bottom = _font(font).getbbox(character)
    image = Image.new("L", (math.ceil(right - left) + 4, math.ceil(bottom - top) + 4))
    ImageDraw.Draw(image).text((2 - left, 2 - top), character, fill=255, font=_font(font))
    ink = image.getbbox()
    if ink is None:
        raise UserError(f"{font.name} draws nothing for {character!r}: damaged font")
    return image.crop(ink)


def _distorted(glyph: Image.Image, rng: np.random.Generator) -> Image.Image:
    """The glyph turned, sheared, widened or narrowed, its stroke made thicker or thinner in 4 of 10 cases."""
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
        # Hairlines of a light serif font would vanish and leave fragments.
        if np.asarray(thin).sum(dtype=np.int64) > 0.5 * np.asarray(moved).sum(dtype=np.int64):
            return thin
    return moved


def _boxed(image: Image.Image) -> NDArray[np.uint8]:
    """The ink scaled to 32 rows, its width by aspect within 4..30 columns, centred: [32, 32]."""
    ink = image.point(_INK).getbbox()
    assert ink is not None
    width = min(30, max(4, round(GRID * (ink[2] - ink[0]) / (ink[3] - ink[1]))))
    left = (GRID - width) // 2
    boxed = np.zeros((GRID, GRID), np.uint8)
    boxed[:, left : left + width] = np.asarray(image.resize((width, GRID), Image.Resampling.BILINEAR, ink))
    return boxed


_INK = [0] * 128 + [255] * 128  # ink is what is at least half covered
