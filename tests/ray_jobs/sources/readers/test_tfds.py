"""Prepared TFDS directories, written here by an own framing, protobuf's messages and array_record's writer."""

import json
from pathlib import Path

import pytest

from pipelines.files.sources import source_files
from pipelines.spec import RecipeError, TfdsSource
from ray_jobs.sources import catalog
from ray_jobs.sources.archives.entries import Files, Listing
from tests.support.archives import image
from tests.support.prepared import FEATURES, FORMATS, OLDER, SPLITS, put_tfds, records
from tests.support.tfrecords import example, framed
from vit_model.errors import UserError


def source(root: Path, **fields: object) -> tuple[TfdsSource, Files]:
    made = TfdsSource(kind="tfds", root=str(root), **fields)
    return made, {name: str(path) for name, path in source_files(made).items()}


def listed(root: Path) -> Listing:
    return catalog.listing(*source(root))


@pytest.mark.parametrize("form", FORMATS)
def test_images_labels_and_splits_are_those_of_the_records(form: str, tmp_path: Path) -> None:
    put_tfds(tmp_path, form)
    found = listed(tmp_path)
    assert found.class_names == ("cat", "dog", "fox")
    entries = found.entries.take([13, 2, 7, 11, 0, 9, 4])  # in any order
    images = list(catalog.images(*source(tmp_path), entries))
    for row, data in zip(entries.to_pylist(), images, strict=True):
        split, _, number = row["key"].partition("/")
        seed = 100 * list(SPLITS).index(split) + int(number)
        assert data == image(seed)
        assert row["label"] == seed % 3
        assert row["split"] == {"train": "train", "validation": "dev", "test": "test"}[split]
    assert len(found.entries) == 14
    assert set(found.entries["codec"].to_pylist()) == {"stored" if form == "tfrecord" else "row"}


@pytest.mark.parametrize("form", FORMATS)
def test_groups_are_those_of_a_feature(form: str, tmp_path: Path) -> None:
    put_tfds(tmp_path, form)
    assert set(listed(tmp_path).entries["group"].to_pylist()) == {None}
    labels = catalog.listing(*source(tmp_path, group="label")).entries
    assert labels["group"].to_pylist() == [str(label) for label in labels["label"].to_pylist()]
    with pytest.raises(UserError, match=r"source.group: no feature 'patient'; features: id, image, label"):
        catalog.listing(*source(tmp_path, group="patient"))


def test_the_older_shape_of_features_is_read(tmp_path: Path) -> None:
    put_tfds(tmp_path, "tfrecord")
    whole = listed(tmp_path)
    (tmp_path / "features.json").write_text(json.dumps(OLDER))
    assert listed(tmp_path) == whole


def test_without_names_classes_are_numbers(tmp_path: Path) -> None:
    put_tfds(tmp_path, "tfrecord")
    (tmp_path / "label.labels.txt").unlink()
    assert listed(tmp_path).class_names == ("0", "1", "2")
    older = json.loads(json.dumps(OLDER).replace('"num_classes": 3', '"num_classes": 5'))
    (tmp_path / "features.json").write_text(json.dumps(older))
    assert listed(tmp_path).class_names == ("0", "1", "2", "3", "4"), "as many as the feature says"
    (tmp_path / "features.json").write_text(json.dumps(FEATURES).replace('"numClasses": "3"', ""))
    assert listed(tmp_path).class_names == ("0", "1", "2"), "as many as occur"


def test_a_split_that_is_not_known_is_left_out_and_said(tmp_path: Path) -> None:
    put_tfds(tmp_path, "tfrecord")
    about = json.loads((tmp_path / "dataset_info.json").read_text())
    about["splits"].append({"name": "unlabelled", "shardLengths": []})
    (tmp_path / "dataset_info.json").write_text(json.dumps(about))
    assert listed(tmp_path).notes == ("its split 'unlabelled' is none that is known and is left out",)


def change(root: Path, case: str) -> None:
    first = root / "toy-train.tfrecord-00000-of-00002"
    match case:
        case "file":
            first.unlink()
        case "records":
            first.write_bytes(framed(records("train")[:3]))
        case "byte":
            data = bytearray(first.read_bytes())
            data[200] ^= 1
            first.write_bytes(data)
        case "end":
            first.write_bytes(first.read_bytes()[:-100])
        case "format":
            put_tfds(root, "tfrecord", fileFormat="riegeli")
        case "label":
            (root / "label.labels.txt").write_text("cat\n")
        case "image":
            first.write_bytes(framed([example({"label": [1]})] * 5))
        case "info":
            (root / "dataset_info.json").write_text('{"splits": [{"name": 3}]}')


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("file", "toy-train.tfrecord-00000-of-00002 is missing"),
        ("records", "has 3 records, but dataset_info.json says 5"),
        ("byte", "record 0 is damaged"),
        ("end", "record 4 is truncated"),
        ("format", "unsupported fileFormat 'riegeli'; expected tfrecord or array_record"),
        ("label", "the label 2 is not one of 1 classes"),
        ("image", "no feature 'image'; features: label"),
        ("info", "not in TFDS's format"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, case: str, message: str) -> None:
    put_tfds(tmp_path, "tfrecord")
    change(tmp_path, case)
    with pytest.raises(ValueError, match=message):
        listed(tmp_path)


def test_a_damaged_array_record_file_is_refused(tmp_path: Path) -> None:
    put_tfds(tmp_path, "array_record")
    path = tmp_path / "toy-train.array_record-00000-of-00002"
    data = path.read_bytes()
    for damaged in (b"", data[:1000], data[:-10], data[:300] + bytes([data[300] ^ 1]) + data[301:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="toy-train"):
            listed(tmp_path)


def test_another_folder_is_refused_when_the_recipe_is_planned(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"does not contain dataset_info\.json; use the folder of one version"):
        source(tmp_path)
