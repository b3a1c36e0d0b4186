"""CIFAR's archives, small ones in their authors' format; its pickles as Python 2 wrote them."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from pipelines.files.sources import source_files
from pipelines.spec import CifarSource
from ray_jobs.sources import catalog
from ray_jobs.sources.archives.entries import Files
from tests.support.archives import tar
from tests.support.cifar import CLASS_NAMES, PER_BATCH, batches, made, members, planes, python2


def source(root: Path, classes: int) -> tuple[CifarSource, Files]:
    given = CifarSource(kind="cifar", classes=classes, root=str(root))
    return given, {name: str(path) for name, path in source_files(given).items()}


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("version", ["python", "binary"])
@pytest.mark.parametrize("unpacked", [False, True])
def test_images_and_labels_are_those_of_the_archive(classes: int, version: str, unpacked: bool, tmp_path: Path) -> None:
    if unpacked:
        for name, data in members(classes, version).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
    else:
        (tmp_path / f"cifar-{classes}-{version}.tar.gz").write_bytes(tar(members(classes, version), "w:gz"))
    given, files = source(tmp_path, classes)
    found = catalog.listing(given, files)
    assert found.class_names == tuple(CLASS_NAMES[classes])
    truth = batches(classes)
    train = [
        (image, label)
        for name, images, labels in truth
        if not name.startswith("test")
        for image, label in zip(images, labels, strict=True)
    ]
    test = list(zip(*truth[-1][1:], strict=True))
    entries = found.entries.take(np.random.default_rng(0).permutation(len(found.entries)))
    for row, image in zip(entries.to_pylist(), catalog.images(given, files, entries), strict=True):
        part, _, number = row["key"].partition("-")
        pixels, label = (train if part == "train" else test)[int(number)]
        np.testing.assert_array_equal(image, pixels)
        assert row["label"] == label
        assert row["split"] in (("train", "dev") if part == "train" else ("test",))
    splits = found.entries["split"].to_pylist()
    assert splits.count("test") == PER_BATCH and 3 <= splits.count("dev") <= 25  # a twelfth of 150
    assert found.image is not None and found.image.model_dump() == {"height": 32, "width": 32, "channels": 3}


def test_both_versions_are_the_same_data_set(tmp_path: Path) -> None:
    listings = []
    for version in ("python", "binary"):
        (tmp_path / version).mkdir()
        (tmp_path / version / f"cifar-100-{version}.tar.gz").write_bytes(tar(members(100, version), "w:gz"))
        listings.append(catalog.listing(*source(tmp_path / version, 100)))
    assert listings[0] == listings[1]


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        (
            "data_batch_3",
            python2({"data": planes(made(10, 0, 2)[0]), "labels": [1]}),
            "data_batch_3: expected a list with one label for each of its",
        ),
        ("data_batch_3", python2({"data": planes(made(10, 0, 1)[0]), "labels": [10]}), "labels outside 0 to 9"),
        ("data_batch_3", python2({"data": [1], "labels": [1]}), "does not contain data of uint8"),
        ("data_batch_3", pickle.dumps(Path("x"), 2), r"data_batch_3: .* refers to pathlib"),
        ("batches.meta", python2({"label_names": ["a"]}), "has 1 names, but CIFAR-10 has 10 classes"),
        ("test_batch", None, "does not contain the CIFAR-10 files"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(path: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    found = members(10, "python")
    if content is None:
        del found[f"cifar-10-batches-py/{path}"]
    else:
        found[f"cifar-10-batches-py/{path}"] = content
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(tar(found, "w:gz"))
    with pytest.raises(ValueError, match=message):
        catalog.listing(*source(tmp_path, 10))
