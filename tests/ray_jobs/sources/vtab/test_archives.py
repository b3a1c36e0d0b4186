"""VTAB's specialised and structured tasks, read from small archives as their authors make them."""

import gzip
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines.files.sources import source_files
from pipelines.spec.vtab import VtabSource
from ray_jobs.sources import catalog
from ray_jobs.sources.vtab import pixels
from ray_jobs.sources.vtab.splits import used
from tests.support import vtab_archives
from tests.support.archives import rar
from tests.support.vtab_archives import ARCHIVES, Truth


def source_of(task: str, root: Path | str, **given: Any) -> tuple[VtabSource, dict[str, str]]:
    source = VtabSource.model_validate({"kind": "vtab", "task": task, "root": str(root)} | given)
    return source, {name: str(path) for name, path in source_files(source).items()}


def decoded(image: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(image)))


def check(task: str, root: Path | str, truth: Truth, **given: Any) -> Any:
    """Every record that VTAB's rule picks is there with its label and its image; gives the listing."""
    source, files = source_of(task, root, **given)
    listing = catalog.listing(source, files)
    entries = listing.entries.to_pylist()
    keys = {part: list(records) for part, records in truth.items()}
    chosen, _ = used(source.task, keys)
    assert {(row["key"], row["split"]) for row in entries} == {
        (f"{one.part}/{keys[one.part][one.number]}", one.split) for one in chosen
    }
    images = catalog.images(source, files, listing.entries)
    for row, found in zip(entries, images, strict=True):
        part, key = row["key"].split("/")
        labels, image = truth[part][key]
        assert row["label"] == labels[task], row["key"]
        if isinstance(image, bytes):
            if task == "diabetic_retinopathy" and source.pixels == "published":
                assert found == pixels.btgraham(image)
            elif task.startswith("clevr") and source.pixels == "published":
                np.testing.assert_array_equal(decoded(found)[..., :3], decoded(image)[..., :3])
                assert found == image if (decoded(image)[..., 3] == 255).all() else decoded(found).shape[2] == 3
            else:
                assert found == image
        else:
            np.testing.assert_array_equal(found, image)
            assert (listing.image.height, listing.image.width, listing.image.channels) == found.shape
    return listing


@pytest.mark.slow
@pytest.mark.parametrize("task", ARCHIVES)
def test_a_task_has_the_labels_splits_and_images_of_its_archives(task: str, tmp_path: Path) -> None:
    listing = check(task, tmp_path, ARCHIVES[task](tmp_path))
    assert {row["split"] for row in listing.entries.to_pylist()} == {"train", "dev", "test"}
    assert listing.notes[0].startswith("incomplete archive")
    assert not listing.unusable


def test_raw_pixels_are_the_authors_files_and_a_note_says_so(tmp_path: Path) -> None:
    truth = vtab_archives.diabetic_retinopathy(tmp_path)
    raw = check("diabetic_retinopathy", tmp_path, truth, pixels="raw")
    assert any("raw pixels" in note for note in raw.notes)
    assert not any("btgraham-300, JPEG" in note for note in raw.notes)
    source, files = source_of("diabetic_retinopathy", tmp_path)
    assert any("btgraham-300, JPEG" in note for note in catalog.listing(source, files).notes)


def test_dsprites_npz_is_the_same_as_its_hdf5(tmp_path: Path) -> None:
    check("dsprites_loc", tmp_path, vtab_archives.dsprites(tmp_path, npz=True))
    (tmp_path / "hdf5").mkdir()
    check("dsprites_ori", tmp_path / "hdf5", vtab_archives.dsprites(tmp_path / "hdf5"))


def test_zipped_and_plain_files_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    """A browser unpacks .gz and keeps the name; Kaggle's list comes zipped or not, its zip whole or in pieces."""
    truth = vtab_archives.smallnorb(tmp_path)
    for path in tmp_path.glob("*-dat.mat.gz"):
        path.write_bytes(gzip.decompress(path.read_bytes()))
    check("smallnorb_azi", tmp_path, truth)
    root = tmp_path / "retinopathy"
    root.mkdir()
    truth = vtab_archives.diabetic_retinopathy(root)
    with zipfile.ZipFile(root / "trainLabels.csv.zip") as archive:
        archive.extract("trainLabels.csv", root)
    (root / "trainLabels.csv.zip").unlink()
    for name in ("train", "test"):
        pieces = sorted(root.glob(f"{name}.zip.0*"))
        (root / f"{name}.zip").write_bytes(b"".join(piece.read_bytes() for piece in pieces))
        for piece in pieces:
            piece.unlink()
    check("diabetic_retinopathy", root, truth, pixels="raw")


def test_classes_are_found_in_a_rar_and_below_any_folder(tmp_path: Path) -> None:
    truth = vtab_archives.resisc45(tmp_path)
    with zipfile.ZipFile(tmp_path / "NWPU-RESISC45.zip") as archive:
        whole = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    (tmp_path / "NWPU-RESISC45.zip").unlink()
    (tmp_path / "NWPU-RESISC45.rar").write_bytes(rar(whole))
    check("resisc45", tmp_path, truth)

    truth = vtab_archives.eurosat(tmp_path)
    with zipfile.ZipFile(tmp_path / "EuroSAT.zip") as archive, zipfile.ZipFile(tmp_path / "new", "w") as other:
        for name in archive.namelist():
            other.writestr(name.replace("2750", "some/EuroSAT_RGB"), archive.read(name))
    (tmp_path / "new").rename(tmp_path / "EuroSAT.zip")
    check("eurosat", tmp_path, truth)
    with zipfile.ZipFile(tmp_path / "EuroSAT.zip", "w") as archive:
        archive.writestr("2750/Sea/Sea_1.jpg", b"")
    source, files = source_of("eurosat", tmp_path)
    with pytest.raises(ValueError, match="EuroSAT has no class 'Sea'"):
        catalog.listing(source, files)


def test_an_image_that_is_listed_but_not_there_is_named(tmp_path: Path) -> None:
    vtab_archives.kitti(tmp_path)
    with zipfile.ZipFile(tmp_path / "data_object_image_2.zip", "w") as archive:
        archive.mkdir("training")
    source, files = source_of("kitti", tmp_path)
    bad = catalog.listing(source, files).unusable
    assert len(bad) > 10
    assert {one.reason for one in bad} == {"not in the archive"}
