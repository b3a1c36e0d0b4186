"""VTAB-1k's splits without TFDS: the order of records, the slices, and check values that were computed elsewhere."""

import hashlib
from typing import get_args

import pyarrow.compute as pc
import pytest

from pipelines.spec.vtab import Task, VtabSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives.entries import Member
from ray_jobs.sources.vtab.splits import RULES, Records, check_value, hash_order, listing, row_place, used
from tests.support.vtab_archives import EUROSAT

SCENES = """
    airplane airport baseball_diamond basketball_court beach bridge chaparral church circular_farmland
    cloud commercial_area dense_residential desert forest freeway golf_course ground_track_field harbor
    industrial_area intersection island lake meadow medium_residential mobile_home_park mountain
    overpass palace parking_lot railway railway_station rectangular_farmland river roundabout runway
    sea_ice ship snowberg sparse_residential stadium storage_tank tennis_court terrace
    thermal_power_station wetland
"""


def numbers(task):
    return {part: range(size) for part, size in RULES[task].sizes.items()}


def of_camelyon():
    names = {"train": "train", "validation": "valid", "test": "test"}
    return {
        part: [f"{names[part]}_{number}" for number in range(size)]
        for part, size in RULES["patch_camelyon"].sizes.items()
    }


def of_clevr():
    return {
        "train": [f"CLEVR_train_{number:06d}.png" for number in range(70_000)],
        "validation": [f"CLEVR_val_{number:06d}.png" for number in range(15_000)],
    }


def of_classes(sizes, digits):
    return {"train": [f"{name}_{name}_{n:0{digits}d}.jpg" for name, size in sizes.items() for n in range(1, size + 1)]}


# task: keys, train800's first keys and check value, val200's
CHECKS = {
    "cifar": (lambda: numbers("cifar"), [16399, 1680, 47917], "5b25ee0661c3bc4a", [13431, 9237], "93377e439662509b"),
    "svhn": (lambda: numbers("svhn"), [16399, 1680, 47917], "901fe4f6d4f65bc8", [21145, 64736], "36ae944d2e322a4f"),
    "smallnorb_azi": (
        lambda: numbers("smallnorb_azi"),
        [16399, 1680, 17307],
        "438b845e2bd4a468",
        [23018, 16932],
        "d9fca0e85af945f0",
    ),
    "dsprites_loc": (
        lambda: numbers("dsprites_loc"),
        [16399, 634903, 206287],
        "54130b46ffd22579",
        [220697, 85843],
        "86005e8c04783edc",
    ),
    "clevr_count": (
        of_clevr,
        [f"CLEVR_train_{n}.png" for n in ("043876", "033421", "062025")],
        "5dc1033102716488",
        [f"CLEVR_train_{n}.png" for n in ("035084", "029360")],
        "9a9150228251ccef",
    ),
    "patch_camelyon": (
        of_camelyon,
        ["train_251464", "train_132287", "train_133786"],
        "c1122cb7e413b8b3",
        ["valid_3270", "valid_10310"],
        "b3998b44bc8423a1",
    ),
    "resisc45": (
        lambda: of_classes(dict.fromkeys(SCENES.split(), 700), 3),
        ["dense_residential_dense_residential_068.jpg", "palace_palace_207.jpg", "golf_course_golf_course_450.jpg"],
        "7c42d524f21f8a68",
        ["cloud_cloud_238.jpg", "roundabout_roundabout_303.jpg"],
        "2a2bb0da49b4bb17",
    ),
    "eurosat": (
        lambda: of_classes(EUROSAT, 1),
        [
            "Forest_Forest_687.jpg",
            "Residential_Residential_188.jpg",
            "HerbaceousVegetation_HerbaceousVegetation_1056.jpg",
        ],
        "7dac90dec1b73063",
        ["SeaLake_SeaLake_804.jpg", "Forest_Forest_1554.jpg"],
        "5c9a3ab3702faf20",
    ),
}


def of(task, **fields):
    return VtabSource(kind="vtab", task=task, root="/archives", **fields)


def sized(tasks):
    """The tasks, those of many records marked as slow."""
    large = {task for task in tasks if sum(RULES[task].sizes.values()) > 60_000}
    return [pytest.param(task, marks=pytest.mark.slow) if task in large else task for task in tasks]


@pytest.mark.parametrize("task", sized(CHECKS))
def test_the_splits_have_the_check_values_of_vtabs(task):
    make, first_train, train, first_dev, dev = CHECKS[task]
    keys = make()
    chosen, notes = used(task, keys)
    of = {split: [keys[one.part][one.number] for one in chosen if one.split == split] for split in ("train", "dev")}
    assert notes == ()
    assert of["train"][: len(first_train)] == first_train
    assert of["dev"][: len(first_dev)] == first_dev
    assert (check_value(of["train"]), check_value(of["dev"])) == (train, dev)
    assert (len(of["train"]), len(of["dev"])) == (800, 200)


def test_the_order_is_by_md5_of_salt_and_key():
    keys = ["a\\b", "ü", "c/d"]
    digests = [hashlib.md5(("train" + key).encode()).hexdigest() for key in ("a/b", "ü", "c/d")]
    assert hash_order("train", keys) == sorted(range(3), key=lambda number: digests[number])
    assert hash_order("train", range(100)) != hash_order("test", range(100))
    with pytest.raises(ValueError, match="train: duplicate record 'c/d'"):
        hash_order("train", [*keys, "c/d"])


TEST_SIZES = {  # of one task for each rule
    "caltech101": 6084,
    "cifar": 10000,
    "dtd": 1880,
    "oxford_flowers102": 6149,
    "oxford_iiit_pet": 3669,
    "sun397": 21750,
    "svhn": 26032,
    "patch_camelyon": 32768,
    "eurosat": 5400,
    "resisc45": 6300,
    "diabetic_retinopathy": 42670,
    "clevr_count": 15000,
    "dmlab": 22735,
    "kitti": 711,
    "dsprites_loc": 73728,
    "smallnorb_azi": 12150,
}


@pytest.mark.parametrize("task", sized(TEST_SIZES))
def test_every_task_has_its_1000_images_and_its_whole_test(task):
    chosen, notes = used(task, numbers(task))
    sizes = {split: sum(one.split == split for one in chosen) for split in ("train", "dev", "test")}
    assert sizes == {"train": 800, "dev": 200, "test": TEST_SIZES[task]}
    assert len({(one.part, one.number) for one in chosen}) == len(chosen)
    assert notes == ()


def test_every_rule_is_tested():
    assert all(RULES[task] in [RULES[tested] for tested in TEST_SIZES] for task in get_args(Task))


@pytest.mark.parametrize("task", get_args(Task))
@pytest.mark.parametrize("size", [7, 60])
def test_an_incomplete_archive_has_all_splits_and_says_that_they_are_not_vtabs(task, size):
    keys = {part: range(size) for part in RULES[task].sizes}
    chosen, notes = used(task, keys)
    assert {one.split for one in chosen} == {"train", "dev", "test"}
    assert len({(one.part, one.number) for one in chosen}) == len(chosen)
    assert notes[0].startswith(f"incomplete archive: {size * len(keys)} of ")


def test_rows_are_numbered_through_all_parts():
    parts = {"train": Records(range(5), [0, 1, 0, 1, 0]), "test": Records(range(4), [1, 0, 1, 1])}
    found = listing(
        of("cifar"), ["a", "b"], parts, image=ImageSize(height=2, width=2, channels=3), notes=["pixels changed"]
    )
    sizes = {"train": 5, "test": 4}
    for row in found.entries.to_pylist():
        part, number = row_place(sizes, row["offset"])
        assert row["key"] == f"{part}/{number}"
        assert row["label"] == parts[part].labels[number]
        assert (row["codec"], row["length"]) == ("row", 12)
    assert found.notes == ("incomplete archive: 9 of 60,000 records, splits are not VTAB's", "pixels changed")


@pytest.mark.parametrize(("keys", "label", "message"), [(["../up"], 0, "not a valid name"), (["a"], 2, "label 2")])
def test_keys_that_lead_outside_and_unknown_labels_are_refused(keys, label, message):
    parts = {"train": Records([*keys, "1", "2"], [label] * 3), "test": Records(["3"], [0])}
    with pytest.raises(ValueError, match=message):
        listing(of("cifar"), ["a", "b"], parts, image=ImageSize(height=2, width=2, channels=3))


@pytest.mark.slow
def test_a_whole_archive_says_how_far_its_splits_are_confirmed():
    def noted(task, keys):
        parts = {part: Records(each, [0] * len(each)) for part, each in keys.items()}
        return listing(of(task), ["a"], parts, image=ImageSize(height=2, width=2, channels=3)).notes

    whole = numbers("cifar")
    (note,) = noted("cifar", whole)
    assert note.startswith("splits confirmed by the check values of train800 and val200; keys are running numbers")
    [other] = noted("cifar", whole | {"train": range(50_000, 100_000)})
    assert other.startswith("splits not confirmed: check values ")
    assert other.endswith("VTAB's are 5b25ee0661c3bc4a and 93377e439662509b")
    assert noted("dtd", numbers("dtd")) == ("splits confirmed by their sizes alone: no check values are known",)


def test_an_image_that_a_list_has_and_the_archive_not_keeps_its_place_and_is_named():
    keys = [f"{number}.jpg" for number in range(10)]
    members = [Member(key, key, 0, 1, "stored", 1) for key in keys]
    whole = {part: Records(keys, [0] * 10, members) for part in ("train", "validation", "test")}
    lacking = whole | {"train": Records(keys, [0] * 10, [None, *members[1:]])}
    every, some = (listing(of("dtd"), ["a"], parts) for parts in (whole, lacking))
    assert [(bad.key, bad.reason) for bad in some.unusable] == [("train/0.jpg", "not in the archive")]
    assert every.entries.filter(pc.not_equal(every.entries["key"], "train/0.jpg")) == some.entries


# Dev and test each are of train, of another part, or the rest of one.
@pytest.mark.parametrize("task", sized(["caltech101", "dtd", "clevr_count", "eurosat", "smallnorb_azi"]))
def test_the_whole_of_a_task_is_all_of_train_with_its_end_as_dev_and_the_same_test(task):
    keys = numbers(task)
    chosen, _ = used(task, keys, 0.1)
    by = {split: [one[:2] for one in chosen if one.split == split] for split in ("train", "dev", "test")}
    assert by["test"] == [one[:2] for one in used(task, keys)[0] if one.split == "test"]
    learned = [*by["train"], *by["dev"]]
    order = [("train", number) for number in hash_order("train", keys["train"])]
    assert learned == order[: len(learned)], "TFDS's train in its order, dev last"
    is_all = RULES[task].test[0] != "train"
    assert len(learned) == (len(order) if is_all else RULES[task].test[1])
    assert len(by["dev"]) == len(learned) - round(0.9 * len(learned))


def test_a_whole_listing_says_so_and_still_compares_vtab_1ks_check_values():
    parts = {"train": Records(range(100), [0] * 100), "test": Records(range(50), [0] * 50)}
    size = ImageSize(height=2, width=2, channels=3)
    found = listing(of("cifar", subset="whole", dev_fraction=0.02), ["a"], parts, image=size)
    assert pc.value_counts(found.entries["split"]).to_pylist() == [
        {"values": "train", "counts": 98},
        {"values": "dev", "counts": 2},
        {"values": "test", "counts": 50},
    ]
    assert found.notes[0] == "all of TFDS's train, of which the last 2% is dev; not VTAB-1k"
    with pytest.raises(ValueError, match=r"dev_fraction 0.02: VTAB-1k's dev has 200 images"):
        of("cifar", dev_fraction=0.02)
