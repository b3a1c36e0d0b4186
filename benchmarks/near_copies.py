"""Which copies of images ingest finds, and which images it mistakes for copies: `python benchmarks/near_copies.py`.

Originals are disjoint parts, 200 x 175 pixels, of the photographs in scikit-learn, matplotlib and scikit-image (from
PyPI, in a temporary folder). Each manipulation makes a copy of every original and saves it as JPEG of quality 85,
unless it says otherwise. Then `find_copies` runs as in ingest, with the originals as the test images of another set: a
copy counts as found if it is left out with its own original as the twin.

False copies are measured on pairs of different originals; on Fashion-MNIST (Debian's dataset-fashion-mnist), digits and
glyphs at their own size, where only `phash` is compared; on the same images enlarged, where all views are compared, to
show what the limit of 32 pixels prevents; and on drawn shapes at 64 pixels.
For comparison, a descriptor that tolerates any crop: SIFT, the 32 strongest at 128 pixels, 64 bits each; two of them
must be within 4 bits of one of the other image's. Prints its tables and writes them to benchmarks/results/; takes
minutes. With --no-keep it only prints them.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import cv2
import matplotlib as mpl
import numpy as np
import pyarrow as pa
from common import install, keep, setting
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance
from sklearn.datasets import load_sample_images

from pipelines.files.sources import source_files
from pipelines.spec import FASHION_MNIST_ROOT, Ingest
from ray_jobs.data import images as hashing
from ray_jobs.data.columns import INDEX, large
from ray_jobs.data.images import Hashes, examine, hashes
from ray_jobs.ingesting.copies import DUPLICATES, OtherSet, find_copies
from ray_jobs.sources import catalog

SCIKIT_IMAGE = "scikit-image==0.26.0"
PHOTOGRAPHS = (
    *("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "coins.png"),
    *("hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
)
WIDTH, HEIGHT, DISTANCE, MOST = 200, 175, 4, 10_000
TABLE = pa.schema([INDEX.field(name) for name in ("key", "sample_id", "content_id", "label", *Hashes._fields)])
KINDS = ("exact", "near", "mirrored", "rotated", "cropped")
Change = Callable[[Image.Image, np.random.Generator], Image.Image]


def originals(folder: Path) -> list[Image.Image]:
    """Return the parts of the photographs, except nearly uniform ones."""
    install(folder, SCIKIT_IMAGE)
    files = [Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"]
    files += [folder / "skimage" / "data" / name for name in PHOTOGRAPHS]
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    photographs += [Image.open(file).convert("RGB") for file in files]
    parts = [
        one.crop((x, y, x + WIDTH, y + HEIGHT))
        for one in photographs
        for y in range(0, one.height - HEIGHT + 1, HEIGHT)
        for x in range(0, one.width - WIDTH + 1, WIDTH)
    ]
    return [part for part in parts if np.asarray(part.convert("L")).std() > 8]


# ------------------------------------------------------------------------------------------------- manipulations


def cut(left: float, top: float, right: float, bottom: float) -> Change:
    """Cut these shares off the sides."""

    def change(image: Image.Image, _: np.random.Generator) -> Image.Image:
        width, height = image.size
        box = (left * width, top * height, width * (1 - right), height * (1 - bottom))
        return image.crop(tuple(map(round, box)))

    return change


def cut_somewhere(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Cut to 70 to 100% of the area, anywhere."""
    side = rng.uniform(0.7, 1) ** 0.5
    x, y = rng.uniform(0, 1 - side, 2)
    return cut(x, y, 1 - side - x, 1 - side - y)(image, rng)


def padded(left: float, top: float, right: float, bottom: float, colour: str) -> Change:
    """Add borders, in shares of the sides."""

    def change(image: Image.Image, _: np.random.Generator) -> Image.Image:
        size = (round(image.width * (1 + left + right)), round(image.height * (1 + top + bottom)))
        frame = Image.new("RGB", size, colour)
        frame.paste(image, (round(image.width * left), round(image.height * top)))
        return frame

    return change


def turned(turn: Image.Transpose) -> Change:
    return lambda image, _: image.transpose(turn)


def with_alpha(image: Image.Image, outside: int) -> Image.Image:
    """Make an ellipse opaque, and everything outside it of alpha `outside`."""
    alpha = Image.new("L", image.size, outside)
    ImageDraw.Draw(alpha).ellipse((5, 5, image.width - 5, image.height - 5), fill=255)
    image = image.copy()
    image.putalpha(alpha)
    return image


def laid_on(image: Image.Image, colour: str) -> Image.Image:
    return Image.alpha_composite(Image.new("RGBA", image.size, colour), image.convert("RGBA")).convert("RGB")


CHANGES: dict[str, Change] = {
    "saved again": lambda image, _: image,
    "grey": lambda image, _: image.convert("L"),
    "half the size": lambda image, _: image.resize((image.width // 2, image.height // 2)),
    "a fifth darker": lambda image, _: ImageEnhance.Brightness(image).enhance(0.8),
    "mirrored left to right": turned(Image.Transpose.FLIP_LEFT_RIGHT),
    "mirrored top to bottom": turned(Image.Transpose.FLIP_TOP_BOTTOM),
    "mirrored along a diagonal": turned(Image.Transpose.TRANSPOSE),
    "rotated by 90 degrees": turned(Image.Transpose.ROTATE_90),
    "rotated by 180 degrees": turned(Image.Transpose.ROTATE_180),
    "rotated by 270 degrees": turned(Image.Transpose.ROTATE_270),
    "cut by 1% on each side": cut(0.01, 0.01, 0.01, 0.01),
    "cut by 2%": cut(0.02, 0.02, 0.02, 0.02),
    "cut by 5%": cut(0.05, 0.05, 0.05, 0.05),
    "cut by 8%": cut(0.08, 0.08, 0.08, 0.08),
    "cut by 12%": cut(0.12, 0.12, 0.12, 0.12),
    "cut by 20%": cut(0.2, 0.2, 0.2, 0.2),
    "cut by 5% on the left only": cut(0.05, 0, 0, 0),
    "cut by 12% on the left only": cut(0.12, 0, 0, 0),
    "cut to 70-100% of the area, anywhere": cut_somewhere,
    "padded by 10% on each side, white": padded(0.1, 0.1, 0.1, 0.1, "white"),
    "padded by 10% on each side, black": padded(0.1, 0.1, 0.1, 0.1, "black"),
    "bars of 20% above and below, black": padded(0, 0.2, 0, 0.2, "black"),
    "padded by 15% on the right, grey": padded(0, 0, 0.15, 0, "grey"),
    "mirrored and cut by 5%": lambda image, rng: cut(0.05, 0.05, 0.05, 0.05)(
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), rng
    ),
    "rotated by 5 degrees": lambda image, _: image.rotate(5, Image.Resampling.BICUBIC),
}
# (original, copy); those with alpha are saved as PNG
ALPHA: dict[str, Callable[[Image.Image], tuple[Image.Image, Image.Image]]] = {
    "alpha that is opaque everywhere": lambda image: (image, image.convert("RGBA")),
    "corners transparent, copy on white": lambda image: (
        with_alpha(image, 0),
        laid_on(with_alpha(image, 0), "white"),
    ),
    "corners transparent, copy on black": lambda image: (
        with_alpha(image, 0),
        laid_on(with_alpha(image, 0), "black"),
    ),
    "corners half transparent, copy on black": lambda image: (
        with_alpha(image, 128),
        laid_on(with_alpha(image, 128), "black"),
    ),
    "corners transparent, copy with the corners": lambda image: (with_alpha(image, 0), image),
}


# ------------------------------------------------------------------------------------------------- what is found


def encoded(image: Image.Image) -> bytes:
    """Encode as PNG if the image has alpha, else as JPEG."""
    file = io.BytesIO()
    image.save(file, "PNG" if image.mode == "RGBA" else "JPEG", quality=85)
    return file.getvalue()


def table(name: str, found: Iterable[Hashes]) -> pa.Table:
    """Return a table of images of one class with these hashes; the key is the number."""
    rows = [
        {"key": f"{n:06d}", "sample_id": f"{name} {n:06d}", "content_id": f"{name} {n}", "label": 0} | own._asdict()
        for n, own in enumerate(found)
    ]
    return pa.Table.from_pylist(rows, schema=TABLE)


def files(name: str, images: Iterable[Image.Image]) -> pa.Table:
    """Return the table of images, saved as files."""
    return table(name, (examine(encoded(image)).hashes for image in images))


def found(copies: pa.Table, of: pa.Table) -> tuple[float, Counter[str]]:
    """Return the share of copies that are left out for their own original, and the kinds."""
    train = copies.append_column("split", pa.array(["train"] * len(copies)))
    others = {"originals": OtherSet(of, ["one"])}
    rows = find_copies("copies", train, ["one"], ["train"] * len(train), others, "keep", DISTANCE).to_pylist()
    right = [row for row in rows if row["done"] == "left out" and row["key"] == row["twin"]]
    return len(right) / len(copies), Counter(row["kind"] for row in right)


def alike(images: pa.Table) -> tuple[Counter[str], int]:
    """Return the number of images with a twin, by the kind found first, and in total."""
    train = images.append_column("split", pa.array(["train"] * len(images)))
    rows = find_copies("images", train, ["one"], ["train"] * len(train), {}, "keep", DISTANCE)
    assert rows.schema == large(DUPLICATES)
    return Counter(rows["kind"].to_pylist()), len(rows)


def pictures(source: dict[str, object], most: int) -> Iterator[NDArray[np.uint8]]:
    """Yield the first images of a source of pixels, in grey."""
    config = Ingest.model_validate({"job": "ingest", "source": source})
    names = {name: str(path) for name, path in source_files(config.source).items()}
    entries = catalog.listing(config.source, names).entries.slice(0, most)
    for pixels in catalog.images(config.source, names, entries):
        assert isinstance(pixels, np.ndarray)
        yield pixels[:, :, 0] if pixels.shape[2] == 1 else np.asarray(Image.fromarray(pixels).convert("L"))


# ------------------------------------------------------------------------------------------------- SIFT


def descriptors(image: Image.Image) -> NDArray[np.uint64]:
    """Return 64 bits of each of the 32 strongest SIFT descriptors at 128 pixels; merge neighbouring directions."""
    grey = np.asarray(image.convert("L"))
    if (scale := 128 / min(grey.shape)) < 1:
        grey = cv2.resize(grey, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    _, vectors = cv2.SIFT_create(nfeatures=32, contrastThreshold=0.01).detectAndCompute(grey, None)
    if vectors is None:
        return np.zeros(0, np.uint64)
    vectors = vectors.reshape(-1, 64, 2).sum(-1)
    bits = vectors > np.median(vectors, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


def agree(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> bool:
    return bool((np.bitwise_count(one[:, None] ^ other) <= DISTANCE).any(1).sum() >= 2) if len(other) else False


def milliseconds(function: Callable[[], object], times: int = 300) -> float:
    """Return the CPU time of one call."""
    function()
    began = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - began) / times * 1e3


# ------------------------------------------------------------------------------------------------- tables


def main() -> None:
    """Measure everything and keep the tables."""
    cv2.setNumThreads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vfb-") as folder:
        parts = originals(Path(folder))
    lines = [
        "# Copies that ingest finds, and images that it mistakes for copies",
        "",
        f"`python benchmarks/near_copies.py`, {setting(load)}. {len(parts)} parts of {2 + 1 + len(PHOTOGRAPHS)} "
        f"photographs; max_distance {DISTANCE}.",
        "",
        "| manipulation | found | as near | SIFT |",
        "|---|---:|---:|---:|",
        *manipulated(parts),
        "",
        *false_positives(parts),
        "",
        *costs(parts),
    ]
    keep("near_copies.md", lines, is_written="--no-keep" not in sys.argv)


def manipulated(parts: Sequence[Image.Image]) -> Iterator[str]:
    """Yield a line for each manipulation."""
    of = files("original", parts)
    described = [descriptors(part) for part in parts]
    for name, change in CHANGES.items():
        rng = np.random.default_rng(0)
        copies = [change(part, rng) for part in parts]
        share, kinds = found(files("copy", copies), of)
        saved = [Image.open(io.BytesIO(encoded(copy))) for copy in copies]
        sift = np.mean([agree(descriptors(copy), own) for copy, own in zip(saved, described, strict=True)])
        yield f"| {name} | {share:.0%} | {(kinds['near'] + kinds['exact']) / len(parts):.0%} | {sift:.0%} |"
    for name, make in ALPHA.items():
        pairs = [make(part) for part in parts]
        share, kinds = found(files("copy", [copy for _, copy in pairs]), files("original", [one for one, _ in pairs]))
        yield f"| {name} | {share:.0%} | {(kinds['near'] + kinds['exact']) / len(parts):.0%} | |"


def false_positives(parts: Sequence[Image.Image]) -> Iterator[str]:
    """Yield a line for each set without copies: the share of images that have a twin, by kind."""
    yield "Images with a false twin (Fashion-MNIST and the digits may contain a few true copies):"
    yield ""
    yield "| images | number | near | mirrored | rotated | cropped |"
    yield "|---|---:|---:|---:|---:|---:|"
    glyphs = {"kind": "glyphs", "images": MOST, "seed": 0}
    small = {
        "Fashion-MNIST, 28 pixels": {"kind": "idx", "root": FASHION_MNIST_ROOT},
        "digits, 8 pixels": {"kind": "digits"},
        "glyphs, 8 pixels": glyphs,
    }
    sets = {"the originals": [np.asarray(part.convert("L")) for part in parts]}
    places = [(y, x) for y in (0, 58, 116) for x in (0, 66, 132)]
    pieces = [part[y : y + 58, x : x + 66] for part in sets["the originals"] for y, x in places]
    sets["their pieces of 66 x 58 pixels"] = [piece for piece in pieces if piece.std() > 8]
    for name, source in small.items():
        if source["kind"] == "idx" and not Path(FASHION_MNIST_ROOT).is_dir():
            continue
        sets[name] = list(pictures(source, MOST))
    shapes = {"kind": "shapes", "label": "shape", "images": MOST, "seed": 0}
    sets["shapes, drawn"] = list(pictures(shapes, MOST))
    for name in [name for name in small if name in sets]:
        times = -(-hashing._SIDE // sets[name][0].shape[0])
        sets[f"{name}, each {times} x {times}"] = [
            own.repeat(times, axis=0).repeat(times, axis=1) for own in sets[name]
        ]
    for name, images in sets.items():
        kinds, _ = alike(table(name, (hashes(np.ascontiguousarray(own)) for own in images)))
        shares = " | ".join(f"{kinds[kind] / len(images):.1%}" for kind in KINDS[1:])
        yield f"| {name} | {len(images):,} | {shares} |"


def costs(parts: Sequence[Image.Image]) -> Iterator[str]:
    """Yield the time of an image's hashes, and of SIFT."""
    big = [part.resize((500, 375)) for part in parts[:50]]
    encodings = [encoded(one) for one in big]
    greys = [np.asarray(one.convert("L").resize((125, 94))) for one in big]
    each = iter(range(10**9))

    def next_of(images: Sequence[object]) -> int:
        return next(each) % len(images)

    small = [np.zeros((31, 31), np.uint8) + np.arange(31, dtype=np.uint8)]
    described = [descriptors(part) for part in parts]
    false = [agree(one, other) for n, one in enumerate(described) for other in described[:n]]
    yield "| milliseconds per image, one core | |"
    yield "|---|---:|"
    yield f"| all of `examine`, JPEG of 500 x 375 | {milliseconds(lambda: examine(encodings[next_of(big)])):.2f} |"
    time_of_hashes = milliseconds(lambda: hashes(greys[next_of(big)]))
    yield f"| its hashes, from the decoded 125 x 94 pixels | {time_of_hashes:.2f} |"
    yield f"| `phash` alone (an image of 31 pixels) | {milliseconds(lambda: hashes(small[0])):.2f} |"
    yield f"| SIFT | {milliseconds(lambda: descriptors(big[next_of(big)]), 50):.1f} |"
    yield ""
    yield (
        f"An image's hashes take {8 * len(Hashes._fields)} bytes in the index, or 8 if it is smaller than 32 pixels; "
        f"SIFT's would take 256. SIFT matches {np.mean(false):.1%} of the pairs of different parts: it is of no use "
        "without comparing where the points lie."
    )


if __name__ == "__main__":
    main()
