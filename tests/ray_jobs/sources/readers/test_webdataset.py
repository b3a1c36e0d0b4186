"""WebDataset tars: what is a sample, its label, its split; nothing in them is executed."""

import pickle
from pathlib import Path

import pytest

from pipelines.files.sources import source_files
from pipelines.spec import RecipeError, WebDatasetSource
from ray_jobs.sources import catalog
from ray_jobs.sources.archives.entries import Listing
from tests.support.archives import image, tar
from tests.support.webdataset import shard


def listed(root: Path, **fields: object) -> Listing:
    source = WebDatasetSource.model_validate({"kind": "webdataset", "root": str(root)} | fields)
    return catalog.listing(source, {name: str(path) for name, path in source_files(source).items()})


def put(root: Path, **shards: dict[str, bytes]) -> Path:
    for name, members in shards.items():
        path = root / f"{name.replace('__', '/').replace('_', '-')}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tar(members))
    return root


def test_samples_labels_and_splits(tmp_path: Path) -> None:
    root = put(
        tmp_path,
        imagenet_train_000000=shard([0, 1, 2]),
        imagenet_train_000001=shard([1, 0], 3, "JPEG"),
        imagenet_validation_000000=shard([2, 1], 9),
    )
    (root / "_info.json").write_text("{}")
    for label in ("cls", "json.label"):
        found = listed(root, label=label)
        rows = {row["key"]: (row["label"], row["split"]) for row in found.entries.to_pylist()}
        assert rows == {
            "imagenet-train-000000.tar/000000.jpg": (0, "train"),
            "imagenet-train-000000.tar/000001.jpg": (1, "train"),
            "imagenet-train-000000.tar/000002.jpg": (2, "train"),
            "imagenet-train-000001.tar/000003.JPEG": (1, "train"),
            "imagenet-train-000001.tar/000004.JPEG": (0, "train"),
            "imagenet-validation-000000.tar/000009.jpg": (2, "dev"),
            "imagenet-validation-000000.tar/000010.jpg": (1, "dev"),
        }
        assert found.class_names == ("0", "1", "2") and not found.unusable
        assert not found.notes
    named = listed(root, label="json.class_name", class_names=("c2", "c1", "c0"))
    assert named.class_names == ("c2", "c1", "c0")
    assert {row["key"][-10:]: row["label"] for row in named.entries.to_pylist()}["000002.jpg"] == 0


@pytest.mark.parametrize("name", ["eval", "holdout", "testset", "x_testing_v2", "evaluation__x"])
def test_shards_beside_train_are_of_their_split_or_left_out_by_name(name: str, tmp_path: Path) -> None:
    shards = {"train_000000": shard([0, 1]), f"{name}_000000": shard([1, 0], 3), "extra_0": shard([0, 2], 5)}
    found = listed(put(tmp_path, **shards))
    assert sorted(found.entries["split"].to_pylist()) == ["test", "test", "train", "train"]
    assert found.class_names == ("0", "1")
    [note] = found.notes
    assert note.startswith("1 file left out") and note.endswith("extra-0.tar")


def test_numbers_that_are_not_from_0_are_the_classes_and_it_is_said(tmp_path: Path) -> None:
    found = listed(put(tmp_path, x=shard([1000000, 7, 10, 7])))
    assert found.class_names == ("7", "10", "1000000")
    assert found.entries["label"].to_pylist() == [2, 0, 1, 0]
    [note] = found.notes
    assert "labels are not 0, 1, 2, ...: the 3 numbers that occur (7 to 1000000) become the classes" in note
    assert not listed(tmp_path, label="json.class_name").notes, "names are given"


def test_bytes_of_each_image_even_from_gzipped_shards(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(tar(shard([0, 1]), "w:gz"))
    (tmp_path / "b.tar").write_bytes(tar(shard([1, 0], 5), "w:gz"))  # its name lies
    source = WebDatasetSource(kind="webdataset", root=str(tmp_path))
    files = {name: str(path) for name, path in source_files(source).items()}
    entries = catalog.listing(source, files).entries
    assert list(catalog.images(source, files, entries)) == [image(i) for i in (0, 1, 5, 6)]
    assert set(entries["split"].to_pylist()) == {None}


def test_names_split_at_the_first_dot_and_samples_are_neighbours(tmp_path: Path) -> None:
    members = {
        "__index__.json": b"{}",
        "v1.0/a.seg.png": b"mask",
        "v1.0/a.jpg": image(1),
        "v1.0/a.cls": b" 1\n",
        "README": b"no dot",
        "._b.jpg": b"shadow",
        "b.JPG": image(2),
        "b.CLS": b"0",
        "c.jpg": image(3),
        "d.cls": b"1",
        "v1.0/a.txt": b"comes again, and is another sample, which has neither",
        "e.cls": b"-1",
        "e.jpg": image(4),
        "f.cls": b"\xff",
        "f.jpg": image(5),
    }
    found = listed(put(tmp_path, x=members))
    assert {(row["key"], row["label"]) for row in found.entries.to_pylist()} == {
        ("x.tar/v1.0/a.jpg", 1),
        ("x.tar/b.JPG", 0),
    }
    assert {bad.key: bad.reason for bad in found.unusable} == {
        "x.tar/c": "the sample has no field cls; it has jpg",
        "x.tar/d": "the sample has no field image; it has cls",
        "x.tar/v1.0/a": "the sample has no field image; it has txt",
        "x.tar/f.jpg": "its label can't be used: it is not text",
    }
    assert found.notes == ("1 samples have a negative label and are left out",)


def test_a_label_field_that_no_sample_has_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    root = put(tmp_path, x={"1.jpg": image(1), "1.json": b"{}", "1.target.txt": b"7"})
    with pytest.raises(ValueError, match=r"has no field cls; it has jpg, json, target\.txt\. Name .* source\.label"):
        listed(root)


def test_names_of_classes_may_be_spelled_in_two_ways(tmp_path: Path) -> None:
    root = put(tmp_path, x={"1.jpg": image(1), "1.cls": b"caf\xc3\xa9", "2.jpg": image(2), "2.cls": b"cafe\xcc\x81"})
    found = listed(root, class_names=("tea", "cafe\u0301"))
    assert found.class_names == ("tea", "cafe\u0301") and found.entries["label"].to_pylist() == [1, 1]


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return open, (str(tmp_path / "pwned"), "w")  # type: ignore[return-value]

    members = {}
    for i in range(2):
        members |= {f"{i}.jpg": image(i), f"{i}.pyd": pickle.dumps(Evil()), f"{i}.cls": b"%d" % i}
    root = put(tmp_path, x=members)
    assert len(listed(root).entries) == 2
    with pytest.raises(ValueError, match=r"contains no usable sample, such as x\.tar/0\.jpg: its label can't be used"):
        listed(root, label="pyd")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("members", "fields", "message"),
    [
        ({"a.jpg": b"1", "a.png": b"2", "a.cls": b"0"}, {}, "several images, jpg, png: set source.image"),
        ({"a.jpg": b"1", "a.JPG": b"2", "a.cls": b"0"}, {}, "duplicate field 'jpg'"),
        ({"a.jpg": b"1", "a.cls": b"0"}, {}, "has 1 classes"),
        ({"a.jpg": b"1", "a.cls": b"0", "b.jpg": b"1", "b.cls": b"x"}, {}, "others text"),
        (
            {"a.jpg": b"1", "a.cls": b"5"},
            {"class_names": ("x", "y")},
            "label '5', which is not in source.class_names",
        ),
    ],
)
def test_what_does_not_fit_is_told(
    members: dict[str, bytes], fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        listed(put(tmp_path, x=members), **fields)


def test_names_of_shards_that_say_nothing_or_too_much(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no file that ends in"):
        listed(tmp_path)
    with pytest.raises(ValueError, match="contains the splits test and train"):
        listed(put(tmp_path, train__test=shard([0, 1])))


def test_groups_are_read_from_a_field_of_their_own_or_from_the_labels_json(tmp_path: Path) -> None:
    members = shard([0, 1, 0, 1])
    for number in range(3):
        members[f"{number:06d}.patient"] = f"p{number // 2}".encode()
    root = put(tmp_path, x=dict(sorted(members.items())))
    assert listed(root, group="json.class_name").entries["group"].to_pylist() == ["c0", "c1", "c0", "c1"]
    assert listed(root).entries["group"].to_pylist() == [None] * 4
    found = listed(root, group="patient")
    assert found.entries["group"].to_pylist() == ["p0", "p0", "p1"]
    assert [each.reason for each in found.unusable] == ["the sample has no field patient; it has cls, jpg, json"]
    wrong = listed(root, group="patient", label="json.label")
    assert wrong.entries["label"].to_pylist() == [0, 1, 0]
