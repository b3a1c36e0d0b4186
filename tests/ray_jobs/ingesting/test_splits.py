"""Splits that stick: nothing that arrives ever moves an image, and no copy is on both sides."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jobs.data.images import Hashes
from ray_jobs.data.shards import INDEX
from ray_jobs.ingesting.copies import OtherSet, find_copies
from ray_jobs.ingesting.splits import Trainable, assign_splits, without_untrained

COLUMNS = ("key", "sample_id", "split", "group", "content_id", "label", *Hashes._fields)
CLASSES = ("ant", "bee", "cat")
SCHEMA = pa.schema([INDEX.field(name).with_nullable(True) for name in COLUMNS])
DISTANCE = 2
WORDS = [int(word) for word in np.random.default_rng(0).integers(1, 2**63, 400)]  # far from each other


class Image(NamedTuple):
    """What a split depends on. Images of one content have one phash."""

    key: str
    content: int
    group: str | None = None
    given: str | None = None
    phash: int | None = None
    label: int = 0
    views: Mapping[str, int] = {}  # hashes of other views of it

    @property
    def seen(self) -> int:
        # 24 places near to their neighbours: 0, 1, 3, 7, 15, ... one bit apart
        return (1 << 32) + (1 << self.content // 2 % 24) - 1 if self.phash is None else self.phash


def table(images: list[Image]) -> pa.Table:
    rows = [
        {"key": one.key, "sample_id": f"{one.content:08x}{one.key}", "split": one.given, "group": one.group}
        | {"content_id": f"{one.content:032x}", "label": one.label, "phash": one.seen}
        | {name: one.views.get(name, 0) for name in Hashes._fields if name != "phash"}
        for one in images
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def assigned(images: list[Image], salt: str | None) -> list[str]:
    return assign_splits(table(images), salt, {one.given for one in images})


def decided(
    images: list[Image],
    others: dict[str, list[Image]] | None = None,
    duplicates: Any = "keep",
    max_distance: int | None = DISTANCE,
    class_names: tuple[str, ...] = CLASSES,
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The split of every image that is not left out, and the rows of copies by key."""
    splits = assigned(images, "salt")
    tests = {name: OtherSet(table(other), class_names) for name, other in (others or {}).items()}
    copies = find_copies("ours", table(images), CLASSES, splits, tests, duplicates, max_distance).to_pylist()
    rows = {row["key"]: row for row in copies}
    assert len(rows) == len(copies), "an image is listed once"
    left_out = {key for key, row in rows.items() if row["done"] == "left out"}
    kept = {one.key: split for one, split in zip(images, splits, strict=True) if one.key not in left_out}
    return kept, rows


contents = st.integers(0, 60)
groups = st.sampled_from([None, None, None, "patient 1", "patient 2", "patient 3"])


@st.composite
def sets(draw: st.DrawFn, given_splits: bool = False, most: int = 14, labelled: bool = False) -> list[Image]:
    """Images; labelled: of several classes, and with views."""
    number = draw(st.integers(0, most))
    splits = st.sampled_from(["train", "train", "test"]) if given_splits else st.none()
    images = [
        Image(f"{draw(st.integers(0, 99)):02d}-{n}", draw(contents), draw(groups), draw(splits)) for n in range(number)
    ]
    if not labelled:
        return images
    views = [Image("", draw(contents)).seen for _ in images]
    return [
        one._replace(label=draw(st.integers(0, 2)), views={"phash_mirrored": view, "phash_crop95": view})
        for one, view in zip(images, views, strict=True)
    ]


def near(one: Image, other: Image) -> bool:
    return one.content == other.content or (one.seen ^ other.seen).bit_count() <= DISTANCE


@pytest.mark.slow
@given(sets(labelled=True), sets(labelled=True), st.sampled_from(["keep", "drop"]))
def test_what_arrives_moves_nothing(old: list[Image], new: list[Image], duplicates: str) -> None:
    new = [one._replace(key=f"new {one.key}") for one in new]
    before, _ = decided(old, duplicates=duplicates)
    after, rows = decided(old + new, duplicates=duplicates)
    for key, split in before.items():
        assert after.get(key) == split or (key not in after and rows[key]["done"] == "left out")
        assert split != "test" or after[key] == "test", "a test image stays test for ever"
    returned = {one.key for one in old} - before.keys() & after.keys()
    assert not returned & after.keys(), "what was left out stays out"


@pytest.mark.slow
@given(sets(), st.sampled_from(["keep", "drop"]))
def test_copies_and_near_copies_never_straddle(images: list[Image], duplicates: str) -> None:
    kept, _ = decided(images, duplicates=duplicates)
    by_key = {one.key: one for one in images}
    for one in kept:
        for other in kept:
            if near(by_key[one], by_key[other]):
                assert kept[one] == kept[other]
                assert duplicates == "keep" or one == other or kept[one] == "test"


@pytest.mark.slow
@given(sets(labelled=True), st.randoms(use_true_random=False))
def test_the_order_of_arrival_is_irrelevant(images: list[Image], random: Any) -> None:
    shuffled = random.sample(images, len(images))
    assert decided(images) == decided(shuffled)


@given(sets())
def test_named_groups_draw_together(images: list[Image]) -> None:
    splits = assigned(images, "salt")
    for name in {one.group for one in images} - {None}:
        assert len({split for one, split in zip(images, splits, strict=True) if one.group == name}) == 1


@pytest.mark.slow
@given(sets())
def test_nothing_is_left_out_without_a_twin_that_is_really_one(images: list[Image]) -> None:
    kept, rows = decided(images)
    by_key = {one.key: one for one in images}
    splits = dict(zip(by_key, assigned(images, "salt"), strict=True))
    order = ["test", "dev", "train"]
    for key, row in rows.items():
        one, twin = by_key[key], by_key[row["twin"]]
        assert near(one, twin)
        assert row["distance"] == (one.seen ^ twin.seen).bit_count()
        assert (row["kind"] == "exact") == (one.content == twin.content)
        assert (row["split"], row["twin_split"]) == (splits[key], splits[row["twin"]])
        assert (row["done"] == "left out") == (order.index(row["twin_split"]) < order.index(row["split"]))
    assert kept.keys() | {key for key, row in rows.items() if row["done"] == "left out"} == by_key.keys()


@pytest.mark.slow
@given(sets(given_splits=True))
def test_official_splits_stay_and_what_they_share_is_listed(images: list[Image]) -> None:
    images = [Image("a", 1, None, "train"), Image("b", 1, None, "test"), Image("c", 2, None, "dev"), *images]
    kept, rows = decided(images)
    assert kept == {one.key: one.given for one in images}
    assert (rows["a"]["twin_split"], rows["a"]["kind"], rows["a"]["done"]) == ("test", "exact", "kept")
    dropped, rows = decided(images, duplicates="drop")
    assert "a" not in dropped
    assert {one.key for one in images if one.given == "test"} <= dropped.keys()


def test_a_dev_that_is_drawn_out_of_an_official_train_shares_nothing_with_it() -> None:
    images = [Image(f"{n}", n, None, "train", WORDS[n // 3]) for n in range(300)]
    images.append(Image("t", 999, None, "test", WORDS[-1]))
    kept, _ = decided(images)
    assert {kept[key] for key in kept} == {"train", "dev", "test"}
    by_key = {one.key: one for one in images}
    for one in kept:
        for other in kept:
            assert kept[one] == kept[other] or not near(by_key[one], by_key[other])


def test_images_near_to_others_test_images_are_left_out_of_train_and_dev_and_listed_with_their_twin() -> None:
    images = [Image(f"{n:03d}", 1000 + n, phash=WORDS[n]) for n in range(200)]
    alone, _ = decided(images)
    others = {
        "cifar": [Image("c0", 1003, phash=WORDS[3]), Image("c1", 7, phash=images[5].seen ^ 3)],
        "pets": [Image(f"p{n}", 1000 + n, phash=WORDS[n]) for n in range(150, 200)],
    }
    kept, rows = decided(images, others)
    assert {key: kept.get(key, "left out") for key in alone if int(key) not in {3, 5, *range(150, 200)}} == {
        key: split for key, split in alone.items() if int(key) not in {3, 5, *range(150, 200)}
    }
    for number, twin, dataset, kind in [
        (3, "c0", "cifar", "exact"),
        (5, "c1", "cifar", "near"),
        (160, "p160", "pets", "exact"),
    ]:
        row = rows[f"{number:03d}"]
        assert (row["twin"], row["twin_dataset"], row["kind"]) == (twin, dataset, kind)
        assert row["done"] == ("kept" if alone[row["key"]] == "test" else "left out")
    assert {split for key, split in kept.items() if int(key) >= 150} == {"test"}


def test_flat_images_are_no_copies_of_each_other() -> None:
    kept, rows = decided([Image(f"{n}", n, phash=0) for n in range(50)])
    assert len(kept) == 50
    assert not rows
    _, rows = decided([Image("a", 1, phash=0), Image("b", 1, phash=0)])
    assert rows["b"]["kind"] == "exact"


def test_without_a_distance_only_the_same_bytes_are_copies() -> None:
    images = [Image("a", 1, phash=5), Image("b", 2, phash=5), Image("c", 2, phash=5)]
    _, rows = decided(images, max_distance=None)
    assert {key: row["kind"] for key, row in rows.items()} == {"c": "exact"}
    _, rows = decided(images, max_distance=0)
    assert len(rows) == 2


def test_shares_are_about_70_10_20() -> None:
    splits = assigned([Image(f"{n}", n) for n in range(5_000)], "salt")
    shares = {split: splits.count(split) / 5_000 for split in ("train", "dev", "test")}
    assert shares == pytest.approx({"train": 0.7, "dev": 0.1, "test": 0.2}, abs=0.02)


def test_an_image_near_copies_of_which_arrive_every_month_is_never_trained_on() -> None:
    """Twelve months of pictures of the same places: whatever was once test never was, nor is, train."""
    images: list[Image] = []
    tested: set[str] = set()
    for month in range(12):
        images += [
            Image(f"{month}-{n}", 100 * month + n, phash=place ^ 1 << month) for n, place in enumerate(WORDS[:20])
        ]
        kept, _ = decided(images)
        tested |= {key for key, split in kept.items() if split == "test"}
        assert {kept[key] for key in tested} == {"test"}
        seen = {one.key: one.seen for one in images}
        trained = [seen[key] for key, split in kept.items() if split == "train"]
        assert not any((seen[key] ^ other).bit_count() <= DISTANCE for key in tested for other in trained)


def test_a_source_without_a_salt_says_every_split_itself() -> None:
    images = [Image(f"{n}", n, None, "train" if n < 90 else "dev") for n in range(100)]
    assert assigned(images, None) == [one.given for one in images], "no test is taken from train"
    assert "test" in assigned(images, "salt")


def test_a_test_split_of_which_nothing_can_be_used_still_is_the_authors() -> None:
    images = table([Image(f"{n}", n, None, "train") for n in range(100)])
    assert "test" not in assign_splits(images, "salt", {"train", "test"})
    assert "test" in assign_splits(images, "salt", {"train"})


@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        ("mirrored", "phash_mirrored", "phash"),
        ("mirrored", "phash", "phash_flipped"),
        ("mirrored", "phash_rotated", "phash_mirrored"),  # mirrored along a diagonal
        ("rotated", "phash", "phash_rotated"),
        ("rotated", "phash_rotated", "phash"),
        ("rotated", "phash_flipped", "phash_mirrored"),  # by 180 degrees
        ("cropped", "phash", "phash_crop95"),
        ("cropped", "phash_crop75", "phash_crop82"),
        ("cropped", "phash_inside", "phash"),
    ],
)
def test_a_copy_of_a_view_is_left_out_only_if_its_label_agrees(kind: str, ours: str, theirs: str) -> None:
    tested = Image("test", 900, None, "test", WORDS[0], 1, {"phash_crop82": WORDS[2], theirs: WORDS[7]})
    tested = tested._replace(phash=WORDS[7]) if theirs == "phash" else tested
    for label, done in (1, "left out"), (2, "kept"):
        for away, distance in (3, DISTANCE), (7, DISTANCE + 1):
            views = {"phash_crop82": WORDS[3], ours: WORDS[7] ^ away}
            image = Image("train", 901, None, "train", WORDS[1], label, views)
            image = image._replace(phash=WORDS[7] ^ away) if ours == "phash" else image
            _, rows = decided([tested, image], duplicates="drop")
            if distance > DISTANCE:
                assert not rows
            else:
                expected = {"twin": "test", "kind": kind, "done": done, "distance": distance}
                assert rows["train"].items() >= expected.items()
                assert (rows["train"]["class"], rows["train"]["twin_class"]) == (CLASSES[label], "bee")


def test_views_that_are_not_compared_and_hashes_of_nothing_make_no_copies() -> None:
    one = Image("a", 1, None, "test", WORDS[0], 0, {"phash_mirrored": WORDS[7], "phash_crop95": WORDS[8]})
    other = Image("b", 2, None, "train", WORDS[1], 0, {"phash_mirrored": WORDS[8], "phash_crop95": WORDS[7]})
    assert not decided([one, other])[1]
    mirrored_alike = other._replace(views={"phash_mirrored": WORDS[7]})
    assert not decided([one, mirrored_alike])[1], "the images themselves are not near then"


def test_a_turned_copy_of_anothers_test_image_is_left_out_unless_that_set_has_its_class() -> None:
    image = Image("ours", 1, None, "train", WORDS[1], CLASSES.index("bee"), {"phash_rotated": WORDS[7]})
    cat = [Image("theirs", 2, None, "test", WORDS[7], 0)]
    for class_names, done in (
        (("siamese", "persian"), "left out"),
        (("bee", "cat"), "left out"),
        (("cat", "bee"), "kept"),
    ):
        _, rows = decided([image], {"pets": cat}, class_names=class_names)
        assert (rows["ours"]["kind"], rows["ours"]["done"]) == ("rotated", done)
        assert rows["ours"]["twin_class"] == class_names[0]


def test_of_several_twins_one_whose_label_agrees_leaves_an_image_out() -> None:
    tests = [
        Image(f"t{label}", 900 + label, None, "test", WORDS[label], label, {"phash_mirrored": WORDS[9] ^ label})
        for label in range(3)
    ]
    for label in range(3):
        image = Image("train", 950, None, "train", WORDS[9], label)
        _, rows = decided([*tests, image], duplicates="drop")
        assert (rows["train"]["twin"], rows["train"]["done"]) == (f"t{label}", "left out")


def test_the_same_bytes_in_two_classes_are_named_and_no_label_is_kept_by_chance() -> None:
    images = [
        *(Image(f"train {label}", 1, None, "train", WORDS[1], label) for label in (0, 1, 1)),
        Image("test 0", 2, None, "test", WORDS[2], 0),
        Image("test 1", 2, None, "test", WORDS[2], 1),
        Image("dev 0", 3, None, "dev", WORDS[3], 0),
        Image("dev test 2", 3, None, "test", WORDS[3], 2),
        Image("sound", 4, None, "train", WORDS[4], 0),
        Image("sound too", 4, None, "train", WORDS[4], 0),
    ]
    images[2] = images[2]._replace(key="train 1 again")
    kept, rows = decided(images)
    assert kept.keys() == {one.key for one in images}
    conflicting = {one.key for one in images[:7]}
    assert {key for key, row in rows.items() if row["kind"] == "conflicting labels"} == conflicting
    for key in conflicting:
        assert rows[key]["class"] != rows[key]["twin_class"] and rows[key]["done"] == "kept"
    assert (rows["test 0"]["twin"], rows["test 1"]["twin"]) == ("test 1", "test 0")
    dropped, rows = decided(images, duplicates="drop")
    assert dropped.keys() == {"test 0", "test 1", "dev test 2", "sound"}
    assert {rows[key]["kind"] for key in conflicting} == {"conflicting labels"}


# ---- classes without a training image

NAMES = tuple("abcdefgh")
label_and_content = st.tuples(st.integers(0, 7), st.integers(0, 400))
labelled = st.lists(label_and_content, max_size=30, unique_by=lambda one: one[1])


def trainable(images: list[tuple[int, int]], may_train: set[int] | None = None) -> Trainable:
    """Of (label, content)."""
    drawn = assigned([Image(f"{content}", content) for _, content in images], "salt")
    labels = [label for label, _ in images]
    index = pa.table(
        {
            "key": [f"{content}" for _, content in images],
            "split": pa.array(drawn, pa.string()),
            "label": pa.array(labels, pa.int32()),
            "labels": pa.array([[label] for label in labels], pa.list_(pa.int32())),
        }
    )
    return without_untrained(index, NAMES, set(labels) if may_train is None else may_train)


def classes_and_splits(found: Trainable) -> dict[str, tuple[str, str]]:
    return {row["key"]: (found.class_names[row["label"]], row["split"]) for row in found.index.to_pylist()}


@given(labelled)
def test_classes_without_a_training_image_are_set_aside_whole(images: list[tuple[int, int]]) -> None:
    found = trainable(images)
    used = classes_and_splits(found)
    trained = {name for name, split in used.values() if split == "train"}
    assert {name for name, _ in used.values()} == trained
    assert {f"{content}" for label, content in images if NAMES[label] in trained} == used.keys()
    assert found.index["labels"].to_pylist() == [[label] for label in found.index["label"].to_pylist()]
    aside = {row["key"]: (row["class_name"], row["split"]) for row in found.set_aside.to_pylist()}
    assert all(split != "train" for _, split in aside.values())
    assert {key: name for key, (name, _) in (used | aside).items()} == {
        f"{content}": NAMES[label] for label, content in images
    }, "every image is in one of the two, under its class"
    assert dict(found.set_aside_classes) == Counter(name for name, _ in aside.values())
    assert set(found.class_names) == set(NAMES) - dict(found.set_aside_classes).keys()


@given(labelled, labelled)
def test_a_class_returns_with_a_training_image_and_no_image_moves(
    old: list[tuple[int, int]], new: list[tuple[int, int]]
) -> None:
    new = [(label, 1000 + content) for label, content in new]
    before, after = trainable(old), trainable(old + new)
    now = classes_and_splits(after)
    assert classes_and_splits(before).items() <= now.items()
    drawn = {row["key"]: (row["class_name"], row["split"]) for row in before.set_aside.to_pylist()}
    still = {row["key"] for row in after.set_aside.to_pylist()}
    assert {key: one for key, one in drawn.items() if key not in still}.items() <= now.items()


def test_a_class_that_the_authors_keep_out_of_train_stays() -> None:
    images = [(0, content) for content in range(20)]
    alone = next(content for content in range(20, 100) if trainable([(3, content)]).set_aside_classes)
    assert trainable([*images, (3, alone)]).set_aside_classes == (("d", 1),)
    assert trainable([*images, (3, alone)], may_train={0}).class_names == NAMES
    assert trainable(images, may_train={0, 5}).set_aside_classes == (("f", 0),), "all its images are damaged"
