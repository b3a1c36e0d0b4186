"""Ingest: a source becomes validated Parquet shards with fixed splits, and a list of what could not be read.

In: a source (`pipelines.spec.Source`). Out: a dataset artifact, see `ray_jobs.shards`, with `quarantine.parquet`.
Every image is decoded once here, so that a failure later means a fault of storage. What is written depends on the
source alone, never on how many tasks write it.

    python -m ray_jobs.ingest --spec ATTEMPT.json
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.spec import DigitsSource, FolderSource, GlyphSource, IdxSource, Source
from pipelines.store import FileEntry
from ray_jobs.progress import Progress
from ray_jobs.shards import (
    SPLITS,
    DatasetInfo,
    ImageSize,
    Sample,
    Shard,
    content_digest,
    shard_file,
    shuffle_key,
    write_info,
    write_shard,
)
from ray_jobs.sources import content_id, digits, folder, glyphs, idx, sample_id
from ray_jobs.stage import Context, Result, run_stage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RAW_SHARD_IMAGES = 8192  # small raw images: a shard is some seconds of rendering
SHARD_BYTES = 256 * 2**20  # image files
READ_CHUNK = 256  # files a validating task looks at
RAW = ImageSize(height=8, width=8, channels=1)


class Written(NamedTuple):
    """What a writing task made of its part: one shard's rows, its file, and (id, label, split) of its samples."""

    shard: Shard
    files: tuple[FileEntry, ...]
    samples: list[tuple[str, int, str]]


class Checked(NamedTuple):
    """One image file that was decoded: its content id and what it is, or the reason why it can't be used."""

    content_id: str
    num_bytes: int
    reason: str | None


def main(context: Context) -> Result:
    """Read the source, write shards, manifest and quarantine."""
    config = context.config
    context.check_source("before it was read")
    match config.source:
        case GlyphSource():
            names, parts, bad = _plan_glyphs(config.source)
        case FolderSource():
            names, parts, bad = _plan_folder(config.source, config.max_bad_fraction)
        case IdxSource():
            names, parts, bad = _plan_idx(config.source)
        case _:
            names, parts, bad = digits.CLASS_NAMES, _plan_digits(config.source), []
    written = _in_tasks(_write_part, [(context, config.source, part) for part in parts], "shard")
    context.check_source("while it was read")
    samples = [sample for part in written for sample in part.samples]
    name = config.source.name if isinstance(config.source, FolderSource | IdxSource) else config.source.kind
    digest = content_digest(name, samples, names)
    info = DatasetInfo(
        name=name,
        class_names=names,
        image=_image_size(config.source),
        splits={split: sum(sample[2] == split for sample in samples) for split in SPLITS},
        shards=tuple(part.shard for part in written),
        content_digest=digest,
    )
    with context.staging() as staging:
        write_info(staging.path, info)
        _write_quarantine(staging.path / "quarantine.parquet", bad)
    files = staging.files + tuple(file for part in written for file in part.files)
    metrics: dict[str, float | int | str] = {
        "images": len(samples),
        "classes": len(names),
        "quarantined": len(bad),
    }
    metrics.update({str(split): count for split, count in info.splits.items()})
    return Result(digest, files, metrics)


def _image_size(source: Source) -> ImageSize | None:
    """The size that all images have, stored raw; None for image files, which keep theirs."""
    match source:
        case FolderSource():
            return None
        case IdxSource():
            height, width, channels = _idx_images(source).images.shape[1:]
            return ImageSize(height=height, width=width, channels=channels)
        case _:
            return RAW


class Part(NamedTuple):
    """What one shard holds: a split, its number, and the images as the source names them."""

    split: str
    number: int
    images: Sequence[Any]


# ------------------------------------------------------------------------------------------------- planning


def _plan_glyphs(source: GlyphSource) -> tuple[tuple[str, ...], list[Part], list[tuple[str, str]]]:
    classes = _glyph_classes(source)
    train = range(source.images)
    dev = range(source.images, source.images + source.dev_images)
    parts = [*_chunks("train", train, RAW_SHARD_IMAGES), *_chunks("dev", dev, RAW_SHARD_IMAGES)]
    return tuple(glyph.name for glyph in classes), parts, []


def _plan_digits(source: DigitsSource) -> list[Part]:
    splits = [sample[2] for sample in _digit_samples(source)]
    return [Part(split, 0, [row for row, own in enumerate(splits) if own == split]) for split in SPLITS]


def _plan_folder(
    source: FolderSource, max_bad_fraction: float
) -> tuple[tuple[str, ...], list[Part], list[tuple[str, str]]]:
    """Decode every image, set the damaged ones aside, and give each of the others its split."""
    listing = folder.scan(Path(source.root).expanduser())
    chunks = [
        listing.entries[start : start + READ_CHUNK] for start in range(0, len(listing.entries), READ_CHUNK)
    ]
    found = [
        checked
        for chunk in _in_tasks(_check_files, [(listing.root, chunk) for chunk in chunks], "chunk")
        for checked in chunk
    ]
    bad = [
        (entry.key, checked.reason)
        for entry, checked in zip(listing.entries, found, strict=True)
        if checked.reason
    ]
    if len(bad) > max_bad_fraction * len(found):
        listed = "".join(f"\n  {key}: {reason}" for key, reason in bad[:20])
        more = f"\n  and {len(bad) - 20} more" if len(bad) > 20 else ""
        raise ValueError(
            f"{len(bad)} of {len(found)} images can't be used, more than max_bad_fraction {max_bad_fraction}: "
            f"remove them or allow more{listed}{more}"
        )
    good = [
        (entry, checked) for entry, checked in zip(listing.entries, found, strict=True) if not checked.reason
    ]
    splits = folder.assign_splits(
        [entry for entry, _ in good], [one.content_id for _, one in good], source.salt
    )
    trained = {entry.label for (entry, _), split in zip(good, splits, strict=True) if split == "train"}
    if lost := [name for label, name in enumerate(listing.class_names) if label not in trained]:
        raise ValueError(
            f"class {lost[0]!r} has no image in train that can be used: add some, or remove the class"
        )
    parts = []
    for split in SPLITS:
        own = [
            (entry, checked) for (entry, checked), given in zip(good, splits, strict=True) if given == split
        ]
        own.sort(key=lambda pair: shuffle_key(pair[1].content_id + pair[0].key))
        parts += _chunks_by_size(split, own)
    return listing.class_names, parts, [(key, str(reason)) for key, reason in bad]


def _plan_idx(source: IdxSource) -> tuple[tuple[str, ...], list[Part], list[tuple[str, str]]]:
    found = _idx_images(source)
    rows = sorted(range(len(found.keys)), key=lambda row: shuffle_key(found.keys[row]))
    parts = [
        part
        for split in SPLITS
        for part in _chunks(split, [row for row in rows if found.splits[row] == split], RAW_SHARD_IMAGES)
    ]
    return tuple(source.class_names[label] for label in source.kept()), parts, []


def _chunks(split: str, images: Sequence[Any], size: int) -> list[Part]:
    starts = range(0, len(images), size)
    return [Part(split, number, images[start : start + size]) for number, start in enumerate(starts)]


def _chunks_by_size(split: str, images: Sequence[tuple[folder.Entry, Checked]]) -> list[Part]:
    ends = accumulate(checked.num_bytes for _, checked in images)
    parts = groupby(zip(ends, images, strict=True), key=lambda pair: pair[0] // SHARD_BYTES)
    return [Part(split, number, [image for _, image in part]) for number, (_, part) in enumerate(parts)]


# ------------------------------------------------------------------------------------------------- tasks


def _write_part(context: Context, source: Any, part: Part) -> Written:
    """Write one shard (in a Ray task)."""
    match source:
        case GlyphSource():
            samples = _glyph_samples(source, part)
        case FolderSource():
            samples = [
                (_file_sample(Path(source.root).expanduser(), entry, checked), entry.label)
                for entry, checked in part.images
            ]
        case IdxSource():
            samples = _idx_samples(source, part)
        case _:
            every = _digit_samples(source)
            samples = [every[row][:2] for row in part.images]
    rows = sorted((sample for sample, _ in samples), key=lambda sample: shuffle_key(sample.sample_id))
    file = shard_file(part.split, part.number)
    with context.staging() as staging:
        write_shard(staging.path / file, rows)
    return Written(
        Shard(split=part.split, file=file, rows=len(rows)),
        staging.files,
        [(sample.sample_id, label, part.split) for sample, label in samples],
    )


@cache
def _glyph_classes(source: GlyphSource) -> list[glyphs.GlyphClass]:
    """Found once a process: it takes a second, and a worker renders several shards."""
    return glyphs.glyph_classes(glyphs.find_fonts(dict(source.files())))


def _glyph_samples(source: GlyphSource, part: Part) -> list[tuple[Sample, int]]:
    images, labels = glyphs.render(_glyph_classes(source), source.seed, part.images)
    keys = [f"glyph-{index:07d}" for index in part.images]
    return [
        (_raw_sample(image, key, label), int(label))
        for image, key, label in zip(images, keys, labels, strict=True)
    ]


@cache
def _digit_samples(source: DigitsSource) -> list[tuple[Sample, int, str]]:
    [(_, path)] = source.files()
    images, labels, keys = digits.read(path)
    samples = [_raw_sample(image, key, label) for image, key, label in zip(images, keys, labels, strict=True)]
    splits = digits.assign_splits([sample.sample_id for sample in samples], labels.tolist(), "vitflow digits")
    return [(sample, int(label), split) for sample, label, split in zip(samples, labels, splits, strict=True)]


@cache
def _idx_images(source: IdxSource) -> idx.Images:
    return idx.read(dict(source.files()), len(source.class_names), source.kept())


def _idx_samples(source: IdxSource, part: Part) -> list[tuple[Sample, int]]:
    images, labels, keys, _ = _idx_images(source)
    return [(_raw_sample(images[row], keys[row], labels[row]), int(labels[row])) for row in part.images]


def _raw_sample(image: NDArray[np.uint8], key: str, label: int) -> Sample:
    pixels, (height, width, channels) = image.tobytes(), image.shape
    return Sample(sample_id(pixels, key), key, pixels, "raw", width, height, channels, int(label))


def _file_sample(root: Path, entry: folder.Entry, checked: Checked) -> Sample:
    data = (root / entry.key).read_bytes()
    if content_id(data) != checked.content_id:
        raise ValueError(f"{entry.key} changed while it was read: run again when the folder is at rest")
    return Sample(sample_id(data, entry.key), entry.key, data, *folder.decode(data), entry.label)


def _check_files(root: Path, entries: Sequence[folder.Entry]) -> list[Checked]:
    """Decode a chunk of image files (in a Ray task)."""
    return [_check_file(root / entry.key) for entry in entries]


def _check_file(path: Path) -> Checked:
    data = path.read_bytes()
    try:
        folder.decode(data)
        reason = None
    except ValueError as error:
        reason = str(error)
    return Checked(content_id(data), len(data), reason)


def _in_tasks(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], noun: str) -> list[Any]:
    """function(*arguments) for each, in Ray tasks of one core, results in order."""
    import ray

    remote = ray.remote(num_cpus=1)(function)
    references = [remote.remote(*each) for each in arguments]
    progress = Progress(len(references), noun)
    pending = references
    while pending:
        _, pending = ray.wait(pending, timeout=1.0)
        done = len(references) - len(pending)
        if done and progress.due(done):
            progress.show(done)
    return list(ray.get(references))


# ------------------------------------------------------------------------------------------------- checks


def _write_quarantine(path: Path, bad: Iterable[tuple[str, str]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = sorted(bad)
    schema = pa.schema([("key", pa.string()), ("reason", pa.string())])
    pq.write_table(pa.table([[key for key, _ in rows], [reason for _, reason in rows]], schema=schema), path)
    for reason, count in Counter(reason for _, reason in rows).most_common():
        print(f"quarantined {count}: {reason}", flush=True)


if __name__ == "__main__":
    run_stage("ingest")
