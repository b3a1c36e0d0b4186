"""WebDataset: tars in which consecutive members form samples (github.com/webdataset/webdataset).

A member's name is split at the first dot of its last part: `a/b.seg.png` is field `seg.png` of the sample `a/b`. The
members of a sample are consecutive, and in one tar. Only the image and the label are read. Labels are text or JSON;
nothing in a tar is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from operator import itemgetter
from typing import NamedTuple

import pyarrow as pa

from pipelines.spec.archives import WebDatasetSource
from ray_jobs.data.columns import ENTRIES
from ray_jobs.sources.archives.containers import each_contents, read
from ray_jobs.sources.archives.entries import Files, Listing, Member, Unusable, place, table
from ray_jobs.sources.names import splits_of_files
from ray_jobs.sources.readers.features import Classes, classes_of, one_spelling
from ray_jobs.sources.readers.folder import EXTENSIONS
from vit_model.errors import UserError

MAX_LABEL_BYTES = 2**20


class Sample(NamedTuple):
    """A sample's image and label, and the member that its group is read from, in the tar `shard`."""

    key: str
    shard: str
    image: Member
    label: Member
    group: Member | None


def listing(source: WebDatasetSource, files: Files) -> Listing:
    """List every sample with an image and a label, except those with a negative number as label, as timm does.

    Raises:
        UserError: fields or labels do not fit, or a shard's name contains two splits.
    """
    unusable: list[Unusable] = []
    splits, notes = splits_of_files(files)
    labels: list[int | str] = []
    tables, skipped = [ENTRIES.empty_table()], 0
    for shard, (members, refused) in zip(splits, each_contents(files, splits), strict=True):
        unusable += refused
        samples: list[Sample] = []
        for sample in _samples(source, shard, members):
            samples.append(sample) if isinstance(sample, Sample) else unusable.append(sample)
        rows = []
        texts = read(files, table(_member(sample, sample.label) for sample in samples))
        grouped = [_member(sample, sample.group) for sample in samples if sample.group is not None]
        group_texts = read(files, table(grouped)) if grouped else repeat(b"")
        for sample, data, group_data in zip(samples, texts, group_texts, strict=bool(grouped)):
            what = "label"
            try:
                label = _label(source.label, data)
                what = "group"
                group = None if source.group is None else str(_label(source.group, group_data))
            except UserError as error:
                reason = f"its {what} can't be used: {error}"
                unusable.append(Unusable(sample.key, reason, shard, sample.label.offset))
                continue
            if isinstance(label, int) and label < 0:
                skipped += 1
                continue
            labels.append(label)
            row = {"key": sample.key, "label": 0, "split": splits[shard], "group": group}
            rows.append(row | place(sample.image))
        tables.append(table(rows))
    if unusable and not labels:
        raise UserError(
            f"{source.root} contains no usable sample, such as {unusable[0].key}: {unusable[0].reason}. "
            "Name the fields as source.image and source.label (json.KEY for a key in JSON)"
        )
    classes = _classes(source, set(labels))
    numbers = pa.array([classes.numbers[label] for label in labels], pa.int32())
    column = ENTRIES.get_field_index("label")
    entries = pa.concat_tables(tables).set_column(column, ENTRIES.field(column), numbers)
    notes = (*classes.notes, *notes)
    notes += (f"{skipped} samples have a negative label and are left out",) if skipped else ()
    return Listing(classes.names, entries, unusable=tuple(unusable), notes=notes)


def _samples(source: WebDatasetSource, shard: str, members: Sequence[Member]) -> Iterator[Sample | Unusable]:
    label_field = source.label.partition(".")[0]
    group_field = label_field if source.group is None else source.group.partition(".")[0]
    named = ((*_key_and_field(member.path), member) for member in members)
    for key, group in groupby(filter(itemgetter(1), named), itemgetter(0)):
        fields: dict[str, Member] = {}
        for _, field, member in group:
            if field in fields:
                raise UserError(f"{shard}: the sample {key!r} has a duplicate field {field!r}")
            fields[field] = member
        images = [field for field in fields if source.image == field or _is_image(source, field)]
        if len(images) > 1:
            raise UserError(
                f"{shard}: the sample {key!r} has several images, {', '.join(images)}: set source.image to one of them"
            )
        if not images or not {label_field, group_field} <= fields.keys():
            missing = label_field if label_field not in fields else group_field
            missing = missing if images else source.image or "image"
            reason = f"the sample has no field {missing}; it has {', '.join(sorted(fields))}"
            yield Unusable(f"{shard}/{key}", reason, shard)
        elif max(fields[label_field].size, fields[group_field].size) > MAX_LABEL_BYTES:
            reason = f"its label or its group has more than {MAX_LABEL_BYTES:,} bytes"
            yield Unusable(f"{shard}/{key}", reason, shard)
        else:
            image = fields[images[0]]
            group_member = None if source.group is None else fields[group_field]
            yield Sample(f"{shard}/{image.path}", shard, image, fields[label_field], group_member)


def _key_and_field(path: str) -> tuple[str, str]:
    """Return a member's key and field; the field is "" without a dot and for WebDataset's metadata `__name__`."""
    folder, slash, name = path.rpartition("/")
    stem, _, field = name.partition(".")
    is_metadata = re.fullmatch(r"__.*__", stem) or re.match(r"__[^/]*__(/|$)", path)
    return f"{folder}{slash}{stem}", "" if is_metadata else field.lower()


def _is_image(source: WebDatasetSource, field: str) -> bool:
    return source.image is None and f".{field}" in EXTENSIONS


def _label(field: str, data: bytes | UserError) -> int | str:
    """Return the number or the text of a label. Raises UserError; its messages are stored in the quarantine."""
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
    """Return the classes of the labels that occur. Raises UserError."""
    if source.class_names is None:
        classes = classes_of([*present], None, f"field {source.label!r}")
        if len(classes.names) < 2:
            raise UserError(f"{source.root} has {len(classes.names)} classes, but a classifier needs two or more")
        return classes
    numbering: dict[int | str, int] = {}
    for number, name in enumerate(source.class_names):
        numbering |= {number: number, name: number}
    spelled = one_spelling([*source.class_names, *(label for label in present if isinstance(label, str))])
    named = {spelled[name]: numbering[name] for name in source.class_names}
    numbering |= {
        text: named[spelling] for text, spelling in spelled.items() if spelling in named and text not in numbering
    }
    if unnamed := sorted(map(str, present - numbering.keys())):
        raise UserError(f"{source.root} has the label {unnamed[0]!r}, which is not in source.class_names")
    return Classes(source.class_names, numbering)


def _member(sample: Sample, member: Member) -> dict[str, object]:
    return {"key": sample.key, "label": 0} | place(member)
