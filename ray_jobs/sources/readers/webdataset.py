"""WebDataset: tars whose members, one after the other, are samples (github.com/webdataset/webdataset).

A member's name splits at the first dot of its last part: `a/b.seg.png` is field `seg.png` of the sample `a/b`. Members
of a sample lie side by side and samples never span tars. Only the image and the label are read; a label is text or
JSON, so that nothing in a tar is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import pyarrow as pa

from pipelines.spec.archives import WebDatasetSource
from ray_jobs.data.columns import ENTRIES
from ray_jobs.sources.archives.containers import Member, each_contents, read
from ray_jobs.sources.archives.entries import Bad, Files, Listing, place, table
from ray_jobs.sources.readers.features import Classes, classes_of
from ray_jobs.sources.readers.folder import EXTENSIONS, SPLIT_NAMES
from vit_model.errors import UserError

MAX_LABEL_BYTES = 2**20


class Sample(NamedTuple):
    """A sample's image and label, in the tar `shard`."""

    key: str
    shard: str
    image: Member
    label: Member


def listing(source: WebDatasetSource, files: Files) -> Listing:
    """Every sample that has an image and a label; those whose label is a negative number are left out, as timm does.

    Raises:
        UserError: fields or labels that don't fit, a shard's name that says two splits.
    """
    bad: list[Bad] = []
    splits = {shard: _split_of(shard) for shard in files}
    labels: list[int | str] = []
    tables, skipped = [ENTRIES.empty_table()], 0
    for shard, (members, refused) in zip(files, each_contents(files, files), strict=True):
        bad += refused
        samples: list[Sample] = []
        for one in _samples(source, shard, members):
            samples.append(one) if isinstance(one, Sample) else bad.append(one)
        rows = []
        for sample, data in zip(samples, read(files, table(map(_labelled, samples))), strict=True):
            try:
                label = _label(source.label, data)
            except UserError as error:
                reason = f"its label can't be used: {error}"
                bad.append(Bad(sample.key, reason, shard, sample.label.offset))
                continue
            if isinstance(label, int) and label < 0:
                skipped += 1
                continue
            labels.append(label)
            rows.append({"key": sample.key, "label": 0, "split": splits[shard]} | place(sample.image))
        tables.append(table(rows))
    if bad and not labels:
        raise UserError(
            f"{source.root} contains no usable sample, such as {bad[0].key}: {bad[0].reason}. "
            "Name the fields as source.image and source.label (json.KEY for a key in JSON)"
        )
    classes = _classes(source, set(labels))
    numbers = pa.array([classes.numbers[label] for label in labels], pa.int32())
    where = ENTRIES.get_field_index("label")
    entries = pa.concat_tables(tables).set_column(where, ENTRIES.field(where), numbers)
    notes = (f"{skipped} samples have a negative label and are left out",) if skipped else ()
    return Listing(classes.names, entries, bad=tuple(bad), notes=(*classes.notes, *notes))


def _samples(source: WebDatasetSource, shard: str, members: Sequence[Member]) -> Iterator[Sample | Bad]:
    label_field = source.label.partition(".")[0]
    named = [(*_key_and_field(member.path), member) for member in members]
    for key, group in groupby((one for one in named if one[1]), key=lambda one: one[0]):
        fields: dict[str, Member] = {}
        for _, field, member in group:
            if field in fields:
                raise UserError(f"{shard}: the sample {key!r} has the field {field!r} twice")
            fields[field] = member
        images = [field for field in fields if source.image == field or _is_image(source, field)]
        if len(images) > 1:
            raise UserError(
                f"{shard}: the sample {key!r} has several images, {', '.join(images)}: name source.image"
            )
        if not images or label_field not in fields:
            lost = source.image or "image" if not images else label_field
            yield Bad(
                f"{shard}/{key}", f"the sample has no field {lost}; it has {', '.join(sorted(fields))}", shard
            )
        elif fields[label_field].size > MAX_LABEL_BYTES:
            yield Bad(f"{shard}/{key}", f"its label has more than {MAX_LABEL_BYTES:,} bytes", shard)
        else:
            image = fields[images[0]]
            yield Sample(f"{shard}/{image.path}", shard, image, fields[label_field])


def _key_and_field(path: str) -> tuple[str, str]:
    """Field "" where there is none: no dot, or WebDataset's own `__name__`."""
    folder, slash, name = path.rpartition("/")
    stem, _, field = name.partition(".")
    own = re.fullmatch(r"__.*__", stem) or re.match(r"__[^/]*__(/|$)", path)
    return f"{folder}{slash}{stem}", "" if own else field.lower()


def _is_image(source: WebDatasetSource, field: str) -> bool:
    return source.image is None and f".{field}" in EXTENSIONS


def _label(field: str, data: bytes | UserError) -> int | str:
    """The number or the text of a label. Raises UserError."""
    if isinstance(data, UserError):
        raise data
    _, dot, key = field.partition(".")
    if dot:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UserError("it is not JSON") from error
        value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise UserError(f"its JSON has no number and no text {key!r}")
        return value
    try:
        text = data.decode().strip()
    except UnicodeDecodeError as error:
        raise UserError("it is not text") from error
    if not text:
        raise UserError("it is empty")
    return int(text) if re.fullmatch(r"-?\d{1,9}", text, re.ASCII) else text


def _classes(source: WebDatasetSource, present: set[int | str]) -> Classes:
    """The classes of the labels that occur. Raises UserError."""
    if source.class_names is None:
        if len(present) < 2:
            raise UserError(f"{source.root} has {len(present)} classes: a classifier needs two or more")
        return classes_of(present, None, f"field {source.label!r}")
    known: dict[int | str, int] = {}
    for number, name in enumerate(source.class_names):
        known |= {number: number, name: number}
    if lost := sorted(map(str, present - known.keys())):
        raise UserError(f"{source.root} has the label {lost[0]!r}, which is none of source.class_names")
    return Classes(source.class_names, known)


def _split_of(shard: str) -> str | None:
    """What the name of a tar or of a folder around it says: imagenet-train-000000.tar, val/00000.tar."""
    words = re.split(r"[^a-z]+", shard.lower())
    found = {SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES}
    if len(found) > 1:
        raise UserError(f"the name of {shard} says {' and '.join(sorted(found))}: which split is it?")
    return found.pop() if found else None


def _labelled(sample: Sample) -> dict[str, object]:
    return {"key": sample.key, "label": 0} | place(sample.label)
