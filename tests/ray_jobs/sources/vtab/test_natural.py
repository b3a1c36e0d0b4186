"""VTAB's seven natural tasks, from small archives that are packed as their authors pack them."""

import io
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines.files.sources import source_files
from pipelines.spec import RecipeError, VtabSource
from ray_jobs.sources import catalog
from ray_jobs.sources.vtab import sun397
from ray_jobs.sources.vtab.splits import check_value, used
from tests.support.archives import zipped
from tests.support.cifar import CLASS_NAMES, batches, members
from tests.support.paths import SHARED
from tests.support.vtab_natural import (
    CALTECH,
    ODD,
    PETS,
    SUN,
    SUN_LISTS,
    caltech_files,
    caltech_zip,
    dtd,
    encoded,
    flowers,
    matlab,
    pets,
    sun_lists,
    sun_tar,
    svhn,
    tarred,
)


def listed(task, root, files, **fields):
    """The source, and what it lists of these files in `root`, as rows by their key."""
    root.mkdir(exist_ok=True)
    for name, data in files.items():
        (root / name).write_bytes(data)
    source = VtabSource(kind="vtab", task=task, root=str(root), **fields)
    there = {name: str(path) for name, path in source_files(source).items()}
    listing = catalog.listing(source, there)
    return source, there, listing, {row["key"]: row for row in listing.entries.to_pylist()}


def images(source, files, listing):
    return dict(zip(listing.entries["key"].to_pylist(), catalog.images(source, files, listing.entries), strict=True))


# ------------------------------------------------------------------------------------------------- files


def test_what_is_missing_is_named_with_its_origin(tmp_path):
    source = VtabSource(kind="vtab", task="oxford_flowers102", root=str(tmp_path))
    (tmp_path / "setid.mat").touch()
    with pytest.raises(RecipeError) as error:
        source_files(source)
    assert "102flowers.tgz or 102flowers.tar.gz or 102flowers.tar (robots.ox.ac.uk" in str(error.value)
    assert "imagelabels.mat" in str(error.value)
    assert "setid.mat" not in str(error.value)


def test_archives_lie_in_the_root_or_in_a_folder_of_the_task_or_of_its_data_set(tmp_path):
    def found():
        return {name: Path(path).relative_to(tmp_path).as_posix() for name, path in source_files(source).items()}

    source = VtabSource(kind="vtab", task="cifar", root=str(tmp_path))
    (tmp_path / "cifar-100-binary.tar.gz").touch()
    assert found() == {"cifar-100-python.tar.gz": "cifar-100-binary.tar.gz"}
    for folder in ("cifar100", "cifar"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "cifar-100-python.tar.gz").touch()
        assert found() == {"cifar-100-python.tar.gz": f"{folder}/cifar-100-python.tar.gz"}


def test_a_zip_that_is_cut_into_parts_is_taken_whole_or_not_at_all(tmp_path):
    source = VtabSource(kind="vtab", task="diabetic_retinopathy", root=str(tmp_path))
    parts = [f"train.zip.{number:03d}" for number in range(1, 6)]
    for name in ("test.zip", "trainLabels.csv.zip", "retinopathy_solution.csv", *parts[:4]):
        (tmp_path / name).touch()
    with pytest.raises(RecipeError, match=r"train\.zip or train\.zip\.001 to \.005 \(kaggle"):
        source_files(source)
    (tmp_path / parts[4]).touch()
    assert [*source_files(source)][:5] == parts


def test_sun397s_lists_may_be_in_tfdss_wheel(tmp_path):
    source = VtabSource(kind="vtab", task="sun397", root=str(tmp_path))
    for name in ("SUN397.tar.gz", "tensorflow_datasets-4.9.10-py3-none-any.whl", "sun397_tfds_te.txt"):
        (tmp_path / name).touch()
    assert {name: Path(path).suffix for name, path in source_files(source).items()} == {
        "SUN397.tar.gz": ".gz",
        "sun397_tfds_tr.txt": ".whl",
        "sun397_tfds_va.txt": ".whl",
        "sun397_tfds_te.txt": ".txt",
    }


def test_a_membership_list_is_for_caltech_alone(tmp_path):
    source = VtabSource(kind="vtab", task="dtd", root=str(tmp_path), membership=str(tmp_path / "list.txt"))
    with pytest.raises(RecipeError, match="only caltech101 uses it"):
        source_files(source)


# ------------------------------------------------------------------------------------------------- Caltech101


def test_caltech101_draws_by_tfdss_rule_on_sorted_listings_and_says_so(tmp_path):
    source, files, listing, rows = listed("caltech101", tmp_path, {"caltech-101.zip": caltech_zip()})
    assert listing.class_names == ("accordion", "background_google", "faces", "yin_yang")
    np.random.seed(1234)
    train = set()
    for folder in sorted(CALTECH):
        names = sorted(path.rsplit("/")[-1] for path in caltech_files() if path.split("/")[1] == folder)
        train |= {f"{folder}/{name}" for name in np.random.choice(names, 30, replace=False)}
    train -= {"BACKGROUND_Google/tmp"}
    every = {path.split("/", 1)[1] for path in caltech_files()} - {"BACKGROUND_Google/tmp"}
    test = {key.removeprefix("test/") for key in rows if key.startswith("test/")}
    assert test == every - train
    assert {key.removeprefix("train/") for key in rows if key.startswith("train/")} == train
    assert {row["label"] for key, row in rows.items() if "/Faces/" in key} == {2}
    assert {row["split"] for row in rows.values()} == {"train", "dev", "test"}
    assert "incomplete archive" in listing.notes[0]
    key = "test/" + min(test)
    assert images(source, files, listing)[key] == caltech_files()["101_ObjectCategories/" + min(test)]


def test_caltech101s_older_archive_holds_the_same(tmp_path):
    *_, old = listed("caltech101", tmp_path / "old", {"101_ObjectCategories.tar.gz": tarred(caltech_files())})
    *_, new = listed("caltech101", tmp_path / "new", {"caltech-101.zip": caltech_zip()})
    assert {key: (row["label"], row["split"]) for key, row in old.items()} == {
        key: (row["label"], row["split"]) for key, row in new.items()
    }


def test_a_supplied_list_is_caltech101s_train_split(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("Faces/image_0002.jpg\nyin_yang/image_0001.jpg\naccordion/image_0003.jpg\n")
    archive = {"caltech-101.zip": caltech_zip()}
    *_, rows = listed("caltech101", tmp_path / "root", archive, membership=str(path))
    assert {key for key in rows if key.startswith("train/")} == {
        "train/Faces/image_0002.jpg",
        "train/yin_yang/image_0001.jpg",
        "train/accordion/image_0003.jpg",
    }
    path.write_text("faces/image_0002.jpg\n")
    with pytest.raises(ValueError, match=r"1 of its images are not in caltech-101\.zip, such as 'faces/image_0002"):
        listed("caltech101", tmp_path / "root", archive, membership=str(path))


# ------------------------------------------------------------------------------------------------- CIFAR-100, SVHN


@pytest.mark.parametrize("version", ["python", "binary"])
def test_cifar100_is_the_same_from_its_python_and_its_binary_version(tmp_path, version):
    archive = {f"cifar-100-{version}.tar.gz": tarred(members(100, version))}
    source, files, listing, rows = listed("cifar", tmp_path, archive)
    assert listing.class_names == tuple(CLASS_NAMES[100])
    truth = {name: (pixels, labels) for name, pixels, labels in batches(100)}
    chosen, _ = used("cifar", {part: range(len(labels)) for part, (_, labels) in truth.items()})
    assert {f"{one.part}/{one.number}": one.split for one in chosen} == {key: row["split"] for key, row in rows.items()}
    for key, pixels in images(source, files, listing).items():
        part, number = key.split("/")
        np.testing.assert_array_equal(pixels, truth[part][0][int(number)])
        assert rows[key]["label"] == truth[part][1][int(number)]
    assert any("python version" in note for note in listing.notes) == (version == "python")


def test_svhn_counts_images_by_its_last_axis_and_has_10_for_0(tmp_path):
    arrays, labels, files = svhn()
    source, there, listing, rows = listed("svhn", tmp_path, files)
    assert listing.class_names == tuple("0123456789")
    for key, pixels in images(source, there, listing).items():
        part, number = key.split("/")
        np.testing.assert_array_equal(pixels, arrays[part][int(number)])
        assert rows[key]["label"] == labels[part][int(number)] % 10
    assert 0 in {row["label"] for row in rows.values()}
    assert Counter(row["split"] for row in rows.values()) == {"train": 26, "dev": 4, "test": 11}


def test_svhns_labels_must_fit(tmp_path):
    files = {
        f"{name}_32x32.mat": matlab(X=np.zeros((32, 32, 3, 4), np.uint8), y=[[1], [2], [11], [3]])
        for name in ("train", "test")
    }
    with pytest.raises(ValueError, match="expected y, one label from 1 to 10 for each of 4 images"):
        listed("svhn", tmp_path, files)


# ------------------------------------------------------------------------------------------------- lists of files


@pytest.mark.parametrize("gz", [True, False])
def test_dtd_takes_the_first_partition(tmp_path, gz):
    keys, files = dtd()
    del files[f"dtd/images/{keys[0]}"]
    source, there, listing, rows = listed("dtd", tmp_path, {"dtd-r1.0.1.tar.gz": tarred(files, gz)})
    assert listing.class_names == ("banded", "polka-dotted", "porous")
    assert {key for key, row in rows.items() if row["split"] == "test"} == {f"test/{key}" for key in keys[2::3]}
    assert {key for key, row in rows.items() if row["split"] == "dev"} == {f"validation/{key}" for key in keys[1::3]}
    assert [(bad.key, bad.reason) for bad in listing.unusable] == [(f"train/{keys[0]}", "not in the archive")]
    assert rows[f"test/{keys[14]}"]["label"] == 1
    assert images(source, there, listing)[f"test/{keys[14]}"] == files[f"dtd/images/{keys[14]}"]


def test_flowers_numbers_begin_with_1(tmp_path):
    labels, files = flowers()
    source, there, listing, rows = listed("oxford_flowers102", tmp_path, files)
    assert (len(listing.class_names), listing.class_names[0], listing.class_names[-1]) == (
        102,
        "pink primrose",
        "blackberry lily",
    )
    by_split = {
        split: {int(key[-9:-4]) for key, row in rows.items() if row["split"] == split}
        for split in ("train", "dev", "test")
    }
    assert by_split == {"train": {*range(11, 31, 2)}, "dev": {*range(1, 11)}, "test": {*range(12, 31, 2)}}
    for key, row in rows.items():
        assert row["label"] == labels[int(key[-9:-4]) - 1] - 1
    assert images(source, there, listing)["test/image_00012.jpg"] == encoded(12)


def test_flowers_of_a_number_without_a_label_are_refused(tmp_path):
    _, files = flowers()
    files["imagelabels.mat"] = matlab(labels=np.ones((1, 29), np.uint8))
    with pytest.raises(ValueError, match=r"setid\.mat: expected a variable .* with numbers from 1 to 29"):
        listed("oxford_flowers102", tmp_path, files)


@pytest.mark.parametrize("pixels", ["published", "raw"])
def test_pets_classes_are_numbered_by_the_lists_and_the_odd_files_encoded_as_jpeg(tmp_path, pixels):
    pictures, files = pets()
    source, there, listing, rows = listed("oxford_iiit_pet", tmp_path, files, pixels=pixels)
    assert listing.class_names == PETS
    assert Counter(row["split"] for row in rows.values())["test"] == 16
    for key, data in images(source, there, listing).items():
        name = key.split("/")[1].removesuffix(".jpg")
        assert listing.class_names[rows[key]["label"]] == name.rpartition("_")[0]
        if name in ODD and pixels == "published":
            wanted, found = (Image.open(io.BytesIO(each)) for each in (pictures[name], data))
            assert (found.format, found.mode) == ("JPEG", "RGB")
            error = np.subtract(np.asarray(found, int), np.asarray(wanted.convert("RGBA"), int)[..., :3])
            assert np.abs(error).mean() < 4
        else:
            assert data == pictures[name]
    assert any("12 files" in note for note in listing.notes) == (pixels == "published")


# ------------------------------------------------------------------------------------------------- SUN397


@pytest.mark.parametrize("wheel", [False, True])
def test_sun397_is_split_by_tfdss_lists_and_has_the_bad_image_left_out(tmp_path, wheel):
    if wheel:
        inside = {f"tensorflow_datasets/image_classification/{name}": data for name, data in sun_lists().items()}
        files = {"tensorflow_datasets-4.9.10-py3-none-any.whl": zipped(inside)}
    else:
        files = sun_lists()
    _, _, listing, rows = listed("sun397", tmp_path, files | {"SUN397.tar.gz": sun_tar()})
    assert listing.class_names == ("/a/abbey", "/c/car_interior/backseat", "/t/track/outdoor")
    keys = list(SUN)
    splits = {"tr": ("train", "train"), "va": ("validation", "dev"), "te": ("test", "test")}
    assert {key: row["split"] for key, row in rows.items()} == {
        splits[part][0] + keys[number]: splits[part][1]
        for part, numbers in SUN_LISTS.items()
        for number in numbers
        if number != 7
    }
    for key, row in rows.items():
        assert listing.class_names[row["label"]] == key[key.index("/") :].rpartition("/")[0]
    assert listing.unusable == ()


@pytest.mark.parametrize("pixels", ["published", "raw"])
def test_sun397s_images_are_at_most_120_000_pixels_of_jpeg_unless_raw(tmp_path, pixels):
    files = sun_lists() | {"SUN397.tar.gz": sun_tar()}
    source, there, listing, _ = listed("sun397", tmp_path, files, pixels=pixels)
    assert ("raw pixels" in listing.notes[1]) == (pixels == "raw")
    for key, data in images(source, there, listing).items():
        original = SUN[key[key.index("/") :]]
        if pixels == "raw":
            assert data == original
            continue
        wanted, found = (Image.open(io.BytesIO(each)) for each in (original, data))
        assert (found.format, found.mode) == ("JPEG", "RGB")
        assert found.size == ((490, 245) if wanted.size == (600, 300) else wanted.size)
        colours = np.asarray(wanted.convert("RGBA").resize(found.size), int)[..., :3]
        assert np.abs(np.asarray(found, int) - colours).mean() < 4


def test_a_file_that_is_no_image_is_a_reason_and_no_failure(tmp_path):
    keys = list(SUN)
    broken = {f"SUN397{key}": SUN[key] for key in keys} | {f"SUN397{keys[2]}": b"\xff\xd8\xff no image"}
    bomb = io.BytesIO()
    Image.new("1", (8200, 8200)).save(bomb, "PNG")
    broken[f"SUN397{keys[5]}"] = bomb.getvalue()
    source, there, listing, _ = listed("sun397", tmp_path, sun_lists() | {"SUN397.tar.gz": tarred(broken)})
    found = images(source, there, listing)
    assert str(found["test" + keys[2]]).startswith("not an image")
    assert str(found["test" + keys[5]]) == "too many pixels (bomb)"
    assert sum(isinstance(image, ValueError) for image in found.values()) == 2


def test_sun397s_lists_have_vtabs_check_values():
    """With TFDS's wheel beside the project; without it the notes of an ingest say the same."""
    shared = SHARED
    if not (wheels := sorted(shared.glob("tensorflow_datasets-*.whl"))):
        pytest.skip("no ../shared/tensorflow_datasets-*.whl: pip download --no-deps tensorflow-datasets==4.9.10")
    keys = sun397.keys({f"sun397_tfds_{part}.txt": str(wheels[-1]) for part in ("tr", "va", "te")})
    chosen, notes = used("sun397", keys)
    train, dev = ([keys[one.part][one.number] for one in chosen if one.split == split] for split in ("train", "dev"))
    assert notes == ()
    assert (check_value(train), check_value(dev)) == ("bbfe318c912bf278", "ed3f4079a4f342a7")
    assert train[0] == "/r/rope_bridge/sun_biqflnsoednmhvce.jpg"
    # what VTAB's authors say of their own, in task_adaptation's issue 21
    assert len({key.rpartition("/")[0] for key in train}) == 309
    assert len({key.rpartition("/")[0] for key in train + dev}) == 325
