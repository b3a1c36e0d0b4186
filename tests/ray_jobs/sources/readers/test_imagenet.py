"""ImageNet-1k and 21k from archives in their authors' format: classes by rank of WNID, ReaL, what does not fit."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.files.sources import source_files
from pipelines.spec import ImageNet21kSource, ImageNetSource, RecipeError
from ray_jobs.sources import catalog
from ray_jobs.sources.archives.entries import Listing
from tests.support.archives import image, tar
from tests.support.imagenet import REAL, SYNSETS, TRUTH, WHOLE, synset, train_tar, write

RANKED = ("n01440764", "n02012849", "n02119789", "n03126707")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("imagenet"))


def listed(root: Path | str, **fields: object) -> Listing:
    source = ImageNetSource.model_validate({"kind": "imagenet", "root": str(root)} | fields)
    return catalog.listing(source, {name: str(path) for name, path in source_files(source).items()})


def read(root: Path | str, listing: Listing) -> Iterator[object]:
    source = ImageNetSource(kind="imagenet", root=str(root))
    return catalog.images(source, {name: str(path) for name, path in source_files(source).items()}, listing.entries)


def test_classes_are_ranks_of_wnids_and_bytes_are_the_authors(root: Path) -> None:
    found = listed(root)
    assert found.class_names == tuple(
        f"{wnid} {words}" for wnid in RANKED for _, other, words in SYNSETS if other == wnid
    )
    entries = {row["key"]: row for row in found.entries.to_pylist()}
    assert len(entries) == len(found.entries) == 4 * 30 + 6 and not found.unusable
    for _, wnid, _ in SYNSETS:
        assert entries[f"train/{wnid}/{wnid}_7.JPEG"]["label"] == RANKED.index(wnid)
    wnids = {number: wnid for number, wnid, _ in SYNSETS}
    for i, truth in enumerate(TRUTH, start=1):
        row = entries[f"val/ILSVRC2012_val_{i:08d}.JPEG"]
        assert (row["label"], row["split"], row["labels"]) == (RANKED.index(wnids[truth]), "test", None)
    images = dict(zip(entries, read(root, found), strict=True))
    assert images["train/n02119789/n02119789_7.JPEG"] == image(1007)
    assert images["val/ILSVRC2012_val_00000002.JPEG"] == image(9002)
    assert set(found.entries["file"].to_pylist()) == {"ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"}


def test_dev_is_a_slice_of_train_that_never_moves(root: Path) -> None:
    small, large = listed(root, dev_fraction=0.1), listed(root, dev_fraction=0.3)
    dev = [{r["key"] for r in found.entries.to_pylist() if r["split"] == "dev"} for found in (small, large)]
    assert 3 <= len(dev[0]) <= 24 and dev[0] < dev[1] and "10.00% of train" in small.notes[0]
    assert Counter(small.entries["split"].to_pylist())["test"] == 6


def test_real_labels_follow_the_number_in_the_name(tmp_path: Path) -> None:
    root = write(tmp_path / "x")
    (root / "real.json").write_text(json.dumps(REAL))
    found = listed(root)
    labels = {row["key"]: row["labels"] for row in found.entries.to_pylist() if row["split"] == "test"}
    real = [labels[f"val/ILSVRC2012_val_{number:08d}.JPEG"] for number in range(1, 7)]
    assert real == [[0], [], [1, 2], [3], [1], []]
    assert any("ReaL" in note for note in found.notes)
    assert "for 100.00% of 4 images" in found.notes[-1]
    (root / "real.json").write_text(json.dumps([*REAL[1:], REAL[0]]))
    with pytest.raises(ValueError, match=r"authors' labels for 0.0% of its images; .* order"):
        listed(root)
    for wrong in ("[[0]]", "{", '{"a": 1}', json.dumps([[4], [], [], [], [], []]), "[" * 50_000):
        (root / "real.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"real\.json"):
            listed(root)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": tar({"n09999999.tar": tar({"a.JPEG": b"x"})})}, "n09999999.tar, which is not a class"),
        (
            {"train": tar({"n01440764.tar": tar({"a.JPEG": b"x" * 2000})[:1500]})},
            "n01440764.tar is truncated",
        ),
        ({"train": train_tar(1) + b"x"}, None),
        ({"train": train_tar(1)[:-30_000]}, "img_train.tar is truncated"),
        (
            {"train": tar({"n0144076.tar": b"", "n0144077.tar": b""})},
            r"img_train.tar contains no synset tars .* n and 8 digits.* 2 other files, such as .*::n0144076.tar",
        ),
        ({"val": tar({"ILSVRC2012_val_00000001.JPEG": b"x"})}, "has 1 images, but the devkit labels 6$"),
        (
            {"val": tar({"ILSVRC2012_val_0000001.JPEG": b"x"})},
            "labels 6; 'ILSVRC2012_val_0000001.JPEG' is not a name like ILSVRC2012_val_00000001.JPEG",
        ),
        ({"val": tar({"ILSVRC2012_val_00000007.JPEG": b"x"})}, "has no label in the devkit"),
        (
            {"t12": tar({"d/data/meta.mat": b"x", "d/data/ILSVRC2012_validation_ground_truth.txt": b""})},
            "meta.mat is damaged",
        ),
        ({"t12": tar({"d/data/meta.mat": b"x"})}, "does not contain data/ILSVRC2012_validation"),
    ],
)
def test_what_does_not_fit_is_told(changes: dict[str, bytes], message: str | None, tmp_path: Path) -> None:
    root = write(tmp_path / "x", **changes)
    if message is None:
        assert len(listed(root).entries) == 10
        return
    with pytest.raises(ValueError, match=message):
        listed(root)


def test_classes_without_a_tar_are_told(tmp_path: Path) -> None:
    some = tar({f"{wnid}.tar": synset(wnid, 3) for wnid in RANKED[1:]})
    found = listed(write(tmp_path / "x", train=some))
    assert len(found.class_names) == 4
    assert found.notes[-1] == "1 classes have no image to train on: n01440764"
    assert not any("no image to train on" in note for note in listed(write(tmp_path / "y")).notes)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    root = write(tmp_path / "x")
    (root / "ILSVRC2012_img_val.tar").unlink()
    with pytest.raises(RecipeError, match=r"does not contain ILSVRC2012_img_val\.tar"):
        listed(root)


# ---- 21k


@pytest.mark.parametrize("form", ["tar", "winter21 tar.gz", "folder", "parts"])
def test_imagenet21k_in_each_form(form: str, tmp_path: Path) -> None:
    tars = {f"{wnid}.tar": synset(wnid, images) for wnid, images in WHOLE.items()}
    root = tmp_path / "whole"
    if form == "folder":
        root.mkdir()
        for name, data in tars.items():
            (root / name).write_bytes(data)
        (root / "README").write_text("not a tar")
    elif form == "tar":
        root.write_bytes(tar(tars))
    elif form == "parts":
        data, root = tar(tars), tmp_path / "whole.tar.01"
        for number in range(3):
            part = data[number * 50_000 : (number + 1) * 50_000 if number < 2 else None]
            (tmp_path / f"whole.tar.{number + 1:02d}").write_bytes(part)
    else:
        root.write_bytes(gzip.compress(tar({f"winter21_whole/{name}": data for name, data in tars.items()})))
    source = ImageNet21kSource(kind="imagenet21k", root=str(root), held_out=0.1)
    files = {name: str(path) for name, path in source_files(source).items()}
    found = catalog.listing(source, files)
    assert found.class_names == ("n00004475", "n02084071", "n12992868")
    assert Counter(found.entries["label"].to_pylist()) == {0: 12, 1: 40, 2: 25}
    assert any("left out" in note and "n00005787" in note for note in found.notes) and not found.unusable
    assert set(found.entries["split"].to_pylist()) == {"train", "dev", "test"}
    images = dict(zip(found.entries["key"].to_pylist(), catalog.images(source, files, found.entries), strict=True))
    assert images["n02084071/n02084071_3.JPEG"] == image(71 + 3)
