"""A user's own images: which files there are, their labels, their splits, and whether they can be read.

In: a folder in one of three layouts.

    root/train/cat/1.jpg  root/test/cat/2.jpg     split folders (train|training, val|valid|validation|dev,
                                                  test|testing, in any case) of class folders
    root/cat/1.jpg        root/dog/2.jpg          class folders
    root/metadata.csv                             Hugging Face's imagefolder: file_name, label and maybe split

Out: `scan` lists entries without opening an image; `assign_splits` fills in the splits that the layout does
not give; `decode` reads one image completely. Only the standard library is imported at module level, so that
`pipelines` can use `scan`.
"""

from __future__ import annotations

import csv
import difflib
import io
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ray_jobs.sources import hash_fraction

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "dev"),
    **dict.fromkeys(("test", "testing"), "test"),
}
SPLITS = ("train", "dev", "test")
FRACTIONS = {"test": 0.2, "dev": 0.1}  # of the images without a given split; the rest is train
METADATA = "metadata.csv"
COLUMNS = ("file_name", "label", "split")


class Entry(NamedTuple):
    """One image: its path relative to the root with "/", its class, its split where the layout gives one."""

    key: str
    label: int
    split: str | None


class Listing(NamedTuple):
    """What a folder holds: entries by key, class names in the plain order of their text, files left out."""

    root: Path
    class_names: tuple[str, ...]
    entries: tuple[Entry, ...]
    ignored: tuple[str, ...]
    """Keys of files that are no images by their ending; hidden files are not even named."""

    def counts(self) -> dict[str, int]:
        """Number of images of each class, by class name."""
        number = Counter(entry.label for entry in self.entries)
        return {name: number[label] for label, name in enumerate(self.class_names)}


def scan(root: Path) -> Listing:
    """List the images below `root`.

    Raises ValueError for: no folder, no image, fewer than two classes, layouts mixed, a link that leads
    outside, a metadata.csv that does not fit, a class that the given splits leave without a training image.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder of images")
    files = sorted(_files(root))
    images = [key for key in files if PurePosixPath(key).suffix.lower() in EXTENSIONS]
    if not images:
        raise ValueError(f"{root} has no images ({', '.join(EXTENSIONS)}) among its {len(files)} files")
    found = _from_metadata(root, images) if METADATA in files else _from_folders(root, images)
    class_names = tuple(sorted({label for _, label, _ in found}))
    if len(class_names) < 2:
        raise ValueError(f"{root} has only the class {class_names[0]!r}: a classifier needs two or more")
    number = {name: label for label, name in enumerate(class_names)}
    entries = tuple(sorted(Entry(key, number[name], split) for key, name, split in found))
    _check_given_splits(root, class_names, entries)
    ignored = tuple(key for key in files if key not in set(images) and key != METADATA)
    return Listing(root, class_names, entries, ignored)


def assign_splits(entries: Sequence[Entry], content_ids: Sequence[str], salt: str) -> list[str]:
    """The split of every entry: the given one, else one drawn by a hash of salt and content.

    Without given splits about 70 % are train, 10 % dev, 20 % test. With some, a dev or test split that is
    missing is taken from train in the same shares. Copies of one image fall into one split, and adding images
    moves none, except in a class so small that a draw left it without a test or a train image: from three
    different images on, the nearest ones are moved so that it has both; with fewer it has a train image.
    """
    given = {entry.split for entry in entries if entry.split is not None}
    wanted = [split for split in FRACTIONS if split not in given]
    splits = [entry.split or "train" for entry in entries]
    by_class: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (entry, identity) in enumerate(zip(entries, content_ids, strict=True)):
        if splits[row] == "train":
            by_class[entry.label][identity].append(row)
    for rows_of in by_class.values():
        drawn = _draw({identity: hash_fraction(salt, identity) for identity in rows_of}, wanted)
        for identity, rows in rows_of.items():
            for row in rows:
                splits[row] = drawn[identity]
    return splits


def decode(source: bytes | Path) -> tuple[str, int, int, int]:
    """(format, width, height, channels) of an image that was decoded completely; 1 channel is grey, else 3.

    What passes is what `vit_model.preprocessing.load_image` reads; width and height are those after its
    turning by EXIF. Raises ValueError with a short reason: "empty file", "not an image", "too many pixels
    (bomb)", "not 8 bits a channel", "truncated", "damaged". Of an animation the first frame counts.
    """
    from PIL import Image, ImageOps

    from vit_model.preprocessing import FORMATS, MAX_PIXELS, MODES

    data = source if isinstance(source, bytes) else source.read_bytes()
    if not data:
        raise ValueError("empty file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                too_large, known_mode = image.width * image.height > MAX_PIXELS, image.mode in MODES
                if not too_large and known_mode:
                    image.load()
                    width, height = ImageOps.exif_transpose(image).size
        # Pillow's readers raise whatever their parsing trips over (struct.error, SyntaxError, EOFError, ...),
        # and one bad file must become one line of quarantine.
        except Exception as error:
            raise ValueError(_reason(error)) from error
    if too_large:
        raise ValueError("too many pixels (bomb)")
    if not known_mode:
        raise ValueError("not 8 bits a channel")
    return (image.format or "").lower(), width, height, 1 if image.mode in ("1", "L", "LA") else 3


def _reason(error: Exception) -> str:
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return "too many pixels (bomb)"
    message = str(error).lower()
    return "truncated" if "truncated" in message or isinstance(error, EOFError) else "damaged"


def _files(root: Path) -> Iterator[str]:
    """Keys of all files that are not hidden; links to folders and links that lead outside are refused."""
    inside = root.resolve()
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        for name in folders:
            if Path(folder, name).is_symlink():
                raise ValueError(f"{Path(folder, name)} is a link to a folder: put the folder itself there")
        for name in files:
            path = Path(folder, name)
            if name.startswith("."):
                continue
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise ValueError(f"{path} is a link that leads outside {root}: put the file itself there")
            yield path.relative_to(root).as_posix()


def _from_folders(root: Path, images: Sequence[str]) -> list[tuple[str, str, str | None]]:
    """(key, class, split) by the names of folders."""
    tops = {PurePosixPath(key).parts[0] for key in images if "/" in key}
    loose = [key for key in images if "/" not in key]
    if loose:
        raise ValueError(f"{root} has images outside class folders, such as {loose[0]!r}: one folder a class")
    split_folders = {top: SPLIT_NAMES[top.lower()] for top in sorted(tops) if top.lower() in SPLIT_NAMES}
    if not split_folders:
        return [(key, PurePosixPath(key).parts[0], None) for key in images]
    others = sorted(tops - set(split_folders))
    if others:
        raise ValueError(
            f"{root} mixes split folders ({', '.join(split_folders)}) and others ({', '.join(others)})"
        )
    if len(set(split_folders.values())) < len(split_folders):
        raise ValueError(f"{root} has two folders for one split: {', '.join(split_folders)}")
    found: list[tuple[str, str, str | None]] = []
    for key in images:
        top, *rest = PurePosixPath(key).parts
        if len(rest) < 2:
            raise ValueError(f"{root} has {key!r} in no class folder: put it into {top}/<class>/")
        found.append((key, rest[0], split_folders[top]))
    return found


def _from_metadata(root: Path, images: Sequence[str]) -> list[tuple[str, str, str | None]]:
    """(key, class, split) by metadata.csv, which must list every image once."""
    with (root / METADATA).open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            _check_columns(reader.fieldnames or [])
            rows = list(reader)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{root / METADATA} is not CSV in UTF-8: {error}") from error
    present, found = set(images), {}
    for number, row in enumerate(rows, start=2):
        where = f"{METADATA} row {number}"
        if None in row or None in row.values():
            raise ValueError(f"{where} has not as many fields as the header")
        key = _inside(row["file_name"], where)
        if key not in present:
            raise ValueError(f"{where}: {key!r} is not an image in {root}")
        if key in found:
            raise ValueError(f"{where}: {key!r} is listed twice")
        if not row["label"]:
            raise ValueError(f"{where}: {key!r} has no label")
        found[key] = (key, row["label"], _split_named(row["split"], where) if "split" in row else None)
    unlisted = sorted(present - set(found))
    if unlisted:
        raise ValueError(
            f"{METADATA} does not list {len(unlisted)} of {len(images)} images, such as {unlisted[0]!r}"
        )
    return list(found.values())


def _check_columns(columns: Sequence[str]) -> None:
    for column in columns:
        if column not in COLUMNS:
            near = difflib.get_close_matches(column.lower(), COLUMNS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(COLUMNS)}"
            raise ValueError(f"{METADATA} has an unknown column {column!r}: {hint}")
    for column in ("file_name", "label"):
        if list(columns).count(column) != 1:
            raise ValueError(f"{METADATA} needs one column {column!r}; it has {', '.join(columns) or 'none'}")


def _inside(name: str, where: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name:
        raise ValueError(f"{where}: file_name {name!r} must be a path inside the folder, relative, with /")
    return path.as_posix()


def _split_named(name: str, where: str) -> str:
    split = SPLIT_NAMES.get(name.strip().lower())
    if split is None:
        raise ValueError(f"{where}: split {name!r} is none of {', '.join(SPLIT_NAMES)}")
    return split


def _check_given_splits(root: Path, class_names: Sequence[str], entries: Sequence[Entry]) -> None:
    if all(entry.split is None for entry in entries):
        return
    trained = {entry.label for entry in entries if entry.split == "train"}
    untrained = [name for label, name in enumerate(class_names) if label not in trained]
    if untrained:
        raise ValueError(f"{root}: class {untrained[0]!r} has no images in the train split")


def _draw(fractions: dict[str, float], wanted: Sequence[str]) -> dict[str, str]:
    """Splits of one class's different images from their hash fractions: test from 0 up, dev, then train."""
    bounds, below = [], 0.0
    for split in wanted:
        below += FRACTIONS[split]
        bounds.append((below, split))
    order = sorted(fractions, key=lambda identity: (fractions[identity], identity))
    drawn = {
        identity: next((split for bound, split in bounds if fractions[identity] < bound), "train")
        for identity in order
    }
    if len(order) >= 3 and "test" in wanted:
        drawn[order[0]] = "test"
    if wanted:
        drawn[order[-1]] = "train"
    return drawn
