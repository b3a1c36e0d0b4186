"""Prepared datasets of TensorFlow Datasets, without TensorFlow.

In: the folder of a version: dataset_info.json (splits and their shards), features.json (the types of features),
label.labels.txt, and shards of tf.train.Example in tfrecord or array_record files. Out: entries in the order of the
records, which is the order of TFDS's slices: train[:800] is train/0000000 to train/0000799. An image in a tfrecord file
is a byte range of it; array_record files are read by record.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader

from pipelines.spec import TfdsSource
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Listing, table
from ray_jobs.sources.archives.examples import Values, feature_range, parse_example, tfrecords
from ray_jobs.sources.names import SPLIT_WORDS
from ray_jobs.sources.readers.features import UNLABELLED, choose_column, classes_of
from vit_model.errors import UserError

_MAX_RECORD = 2**28  # bytes
_BATCH = 256  # records
_FILE_BITS = 40  # bits of the record's number, below its file's


def listing(source: TfdsSource, files: Files) -> Listing:
    """List every image that has a label. All records are read and their checksums verified."""
    info, features = _json(files, "dataset_info.json"), _json(files, "features.json")
    form = info.get("fileFormat", "tfrecord")
    if form not in ("tfrecord", "array_record"):
        raise UserError(f"dataset_info.json: unsupported fileFormat {form!r}; expected tfrecord or array_record")
    image, label = _named(source, features)
    # the position of each image, in little memory: names of files are shared
    names, offsets, lengths = list[str](), array("q"), array("q")
    labels: list[int | str] = []
    groups: list[str | None] = []
    notes: list[str] = []
    splits: dict[str, int] = {}
    for name, shards in _shards(info, form, files):
        if name.lower() not in SPLIT_WORDS:
            notes.append(f"its split {name!r} is none that is known and is left out")
            continue
        before = len(labels)
        for file, length in shards:
            for start, example in _records(files, form, file, length):
                try:
                    offset, size = feature_range(example, image)
                    values = parse_example(example)
                    labels.append(_label(values.get(label), label))
                    groups.append(None if source.group is None else _group(values, source.group))
                except UserError as error:
                    raise UserError(f"{file}, at {start}: {error}") from error
                names.append(file)
                offsets.append(start + offset if form == "tfrecord" else start)
                lengths.append(size)
        splits[name] = len(labels) - before
    if not labels:
        raise UserError(f"dataset_info.json has no known split: {'; '.join(notes) or 'it has none'}")
    classes = classes_of(labels, _class_names(files, features, label), f"feature {label!r}")
    notes += classes.notes
    keys = ((split, f"{split}/{number:07d}") for split, size in splits.items() for number in range(size))
    entries = (
        {"key": key, "split": SPLIT_WORDS[split.lower()], "label": classes.numbers[value], "group": group}
        | {"file": file, "offset": offset, "length": length}
        | {"codec": "stored" if form == "tfrecord" else "row"}
        for (split, key), value, group, file, offset, length in zip(
            keys, labels, groups, names, offsets, lengths, strict=True
        )
        if value != UNLABELLED
    )
    return Listing(classes.names, table(entries), notes=tuple(notes))


def rows(source: TfdsSource, files: Files, numbers: Sequence[int]) -> Iterator[bytes | UserError]:
    """Yield the image files of these records of array_record files."""
    names = sorted(files)
    image, _ = _named(source, _json(files, "features.json"))
    readers: dict[str, Any] = {}
    try:
        for number in numbers:
            name = names[number >> _FILE_BITS]
            if name not in readers:
                readers[name] = _reader(files, name)
            try:
                [example] = readers[name].read([number % 2**_FILE_BITS])
                offset, length = feature_range(example, image)
                yield example[offset : offset + length]
            except (RuntimeError, ValueError) as error:
                yield UserError(f"its record can't be read: {error}")
    finally:
        for reader in readers.values():
            reader.close()


# ------------------------------------------------------------------------------------------------- metadata


def _json(files: Files, name: str) -> dict[str, Any]:
    try:
        value = json.loads(containers.read_file(files, name))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{name} is not a JSON object")
    return value


def _shards(info: dict[str, Any], form: str, files: Files) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield the name of each split, and (name, number of records) of its files."""
    try:
        for split in info["splits"]:
            lengths = [int(length) for length in split["shardLengths"]]
            template = split.get("filepathTemplate") or "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
            tokens = {"{DATASET}": info["name"], "{SPLIT}": split["name"], "{FILEFORMAT}": form}
            for token, value in tokens.items():
                template = template.replace(token, value)
            names = [
                template.replace("{SHARD_X_OF_Y}", f"{number:05d}-of-{len(lengths):05d}")
                for number in range(len(lengths))
            ]
            if missing := [name for name in names if name not in files]:
                raise UserError(f"{missing[0]} is missing")
            yield split["name"], list(zip(names, lengths, strict=True))
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"dataset_info.json is not in TFDS's format: {error!r}") from error


def _features(features: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return each feature's class ("Image") and description, from TFDS's current format or that before 2022."""
    inner = features.get("featuresDict", {}).get("features") or features.get("content")
    if not isinstance(inner, dict):
        raise UserError("features.json is not in TFDS's format: it has no features")
    return {
        name: (str(feature.get("pythonClassName") or feature.get("type")).rpartition(".")[2], feature)
        for name, feature in inner.items()
        if isinstance(feature, dict)
    }


def _named(source: TfdsSource, features: dict[str, Any]) -> tuple[str, str]:
    """Return the names of the features of the image and of the label."""
    kinds = {name: kind for name, (kind, _) in _features(features).items()}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    image = choose_column("image", source.image, images, images)
    others = [name for name in kinds if name != image]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    return image, choose_column("label", source.label, labels, others)


def _class_names(files: Files, features: dict[str, Any], label: str) -> list[str] | None:
    """Return the names in <feature>.labels.txt, else numbers for the classes of features.json; None for neither."""
    name = f"{label.replace('/', '-')}.labels.txt"
    if name in files:
        return containers.text(containers.read_file(files, name), name).splitlines()
    feature = _features(features)[label][1]
    older = feature.get("content")
    number = feature.get("classLabel", {}).get("numClasses")
    if isinstance(older, dict):
        number = older.get("num_classes")
    try:
        return [str(value) for value in range(int(number))] if number else None
    except (ValueError, TypeError) as error:
        raise UserError(f"features.json: {label!r} has {number!r} classes, which is not a number") from error


# ------------------------------------------------------------------------------------------------- records


def _records(files: Files, form: str, name: str, length: int) -> Iterator[tuple[int, bytes]]:
    """Yield (the record's offset, or its number, and the serialised example) of each record of a file."""
    number = 0
    try:
        for record in _tfrecords(files, name) if form == "tfrecord" else _array_records(files, name):
            number += 1
            yield record
    except RuntimeError as error:  # array_record's
        raise UserError(f"{name}: {error}") from error
    if number != length:
        raise UserError(f"{name} has {number} records, but dataset_info.json says {length}")


def _tfrecords(files: Files, name: str) -> Iterator[tuple[int, bytes]]:
    with containers.local(files, name).open("rb") as file:
        try:
            for offset, size in tfrecords(file):
                if size > _MAX_RECORD:
                    raise UserError(f"a record has {size} bytes, more than {_MAX_RECORD}")
                file.seek(offset)
                yield offset, file.read(size)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error


def _array_records(files: Files, name: str) -> Iterator[tuple[int, bytes]]:
    first = sorted(files).index(name) << _FILE_BITS
    reader = _reader(files, name)
    try:
        total = reader.num_records()
        for start in range(0, total, _BATCH):
            for number, example in enumerate(reader.read(start, min(start + _BATCH, total)), start=start):
                yield first + number, example
    finally:
        reader.close()


def _reader(files: Files, name: str) -> Any:
    reader = ArrayRecordReader(str(containers.local(files, name)))
    if not reader.ok():
        raise UserError(f"{name} is not an array_record file, or damaged")
    return reader


def _label(values: Values | None, name: str) -> int | str:
    if not values or len(values) != 1 or isinstance(values[0], float):
        raise UserError(f"feature {name!r} is not one whole number or text")
    return containers.text(values[0], f"feature {name!r}") if isinstance(values[0], bytes) else values[0]


def _group(values: dict[str, Values], name: str) -> str:
    if name not in values:
        raise UserError(f"source.group: no feature {name!r}; features: {', '.join(sorted(values))}")
    return str(_label(values[name], name))
