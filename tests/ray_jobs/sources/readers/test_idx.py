"""IDX files: what is read is what was written, damage is told and never read past, classes are a filter."""

import gzip
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.files.sources import source_files
from pipelines.recipe.load import load_pipeline
from pipelines.spec import FASHION_MNIST_ROOT, IdxSource, RecipeError
from ray_jobs.data import shards
from ray_jobs.sources.readers import idx
from tests.support.idx import NAMES, encoded

RNG = np.random.default_rng(0)
TRAIN, TEST = RNG.integers(0, 256, (240, 6, 5), np.uint8), RNG.integers(0, 256, (60, 6, 5), np.uint8)
TRAIN[7] = TRAIN[3]  # a copy, as the real sets have them
LABELS, TEST_LABELS = np.arange(240, dtype=np.uint8) % 4, np.arange(60, dtype=np.uint8) % 4
needs_files = pytest.mark.skipif(not Path(FASHION_MNIST_ROOT).is_dir(), reason="apt-get install dataset-fashion-mnist")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four small files as copies of them are named: gzipped, as the authors do, or with a dot."""
    for name, array in zip(NAMES, (TRAIN, LABELS, TEST, TEST_LABELS), strict=True):
        if name.startswith("train"):
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(encoded(array)))
        else:
            (tmp_path / name.replace("images-idx", "images.idx")).write_bytes(encoded(array))
    return tmp_path


def source(root: Path, **fields: object) -> IdxSource:
    own = {"kind": "idx", "name": "abcd", "root": str(root), "class_names": tuple("abcd")}
    return IdxSource.model_validate(own | fields)


def read_file(path: Path) -> np.ndarray:
    return idx.read_file({"file": str(path)}, "file")


def located(of: IdxSource) -> dict[str, str]:
    return {name: str(path) for name, path in source_files(of).items()}


def read(of: IdxSource) -> idx.Images:
    return idx.read(located(of), len(of.class_names), of.selected())


# ---- what is read


def test_what_is_read_is_what_was_written(root: Path) -> None:
    found = read(source(root))
    np.testing.assert_array_equal(found.images[..., 0], np.concatenate([TRAIN, TEST]))
    np.testing.assert_array_equal(found.labels, np.concatenate([LABELS, TEST_LABELS]))
    assert found.keys[0] == "train-000000" and found.keys[240] == "test-000000"
    counts = Counter(found.splits)
    assert found.splits[240:] == ["test"] * 60 and counts["test"] == 60
    assert 8 <= counts["dev"] <= 35, "a twelfth of 240"
    assert found.splits[7] == found.splits[3], "copies stay together"


def test_a_choice_of_classes_is_a_filter_and_moves_no_image(root: Path) -> None:
    wanted = source(root, classes=(3, 1))
    every, some = read(source(root)), read(wanted)
    kept = np.isin(every.labels, [1, 3])
    np.testing.assert_array_equal(some.images, every.images[kept])
    np.testing.assert_array_equal(some.labels, every.labels[kept] // 2)
    assert some.keys == [key for key, keep in zip(every.keys, kept, strict=True) if keep]
    assert some.splits == [split for split, keep in zip(every.splits, kept, strict=True) if keep]
    listing = idx.listing(wanted, located(wanted))
    assert listing.class_names == ("b", "d") and listing.image == shards.ImageSize(height=6, width=5, channels=1)
    for column in ("key", "label", "split"):
        assert listing.entries[column].to_pylist() == list(getattr(some, f"{column}s"))
    lasts = listing.entries["offset"].to_pylist()[-2:]
    np.testing.assert_array_equal([*idx.rows(wanted, located(wanted), lasts)], some.images[-2:])


@pytest.mark.slow
@needs_files
def test_the_real_files_are_read_as_their_format_says() -> None:
    files = {name: Path(FASHION_MNIST_ROOT, f"{name}.gz") for name in NAMES}
    plain = {name: gzip.decompress(path.read_bytes()) for name, path in files.items()}
    found = idx.read({name: str(path) for name, path in files.items()}, 10, range(10))
    assert found.images.tobytes() == plain[NAMES[0]][16:] + plain[NAMES[2]][16:]
    np.testing.assert_array_equal(found.labels, [*plain[NAMES[1]][8:], *plain[NAMES[3]][8:]])
    counts = Counter(found.splits)
    assert counts["test"] == 10_000 and abs(counts["dev"] - 5_000) < 250
    assert Counter(found.labels.tolist()) == dict.fromkeys(range(10), 7_000)


# ---- what is refused


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "begins with nothing"),
        (b"\x89PNG....", "not an IDX file: it begins with 89 50 4e 47"),
        (encoded(TRAIN).replace(b"\x08", b"\x0d", 1), "type 0x0d and 3 dimensions"),
        (b"\0\0\x08\x02" + bytes(8), "and 2 dimensions"),
        (encoded(TRAIN)[:10], "ends inside its header"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 0, 28, 28), "0 x 28 x 28"),
        (struct.pack(">4B3I", 0, 0, 8, 3, *[2**32 - 1] * 3), "1024 pixels per side"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 1, 2**20, 2**10), "1024 pixels per side"),
        (struct.pack(">4BI", 0, 0, 8, 1, 2**30) + b"123", "says 1,073,741,824 numbers, but it has 3"),
        (encoded(TRAIN) + b"\0", "says 7,200 numbers, but it has 7,201"),
        (gzip.compress(encoded(TRAIN))[:-9], "truncated or damaged"),
        (gzip.compress(encoded(TRAIN) + bytes(2**24)), "it has 16,784,416"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_file(tmp_path / "file")


def test_a_hostile_header_allocates_nothing(tmp_path: Path) -> None:
    import tracemalloc

    lie = struct.pack(">4B3I", 0, 0, 8, 3, 2**20, 32, 32) + bytes(5000)
    for name, data in (("plain", lie), ("zipped", gzip.compress(lie))):
        (tmp_path / name).write_bytes(data)
        tracemalloc.start()
        with pytest.raises(ValueError, match="it has 5,000"):
            read_file(tmp_path / name)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * 2**20


@pytest.mark.parametrize("data", [encoded(LABELS), gzip.compress(encoded(LABELS))], ids=["plain", "zipped"])
def test_a_truncated_file_is_always_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("idx") / "file"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="file"):
            read_file(path)


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_is_told_or_changes_only_what_no_checksum_covers(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    data = bytearray(encoded(LABELS))
    at = position % len(data)
    data[at] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "flipped"
    path.write_bytes(data)
    try:
        found = read_file(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert at >= 8 and (found != LABELS).sum() == 1


def replaced(root: Path, name: str, array: np.ndarray) -> None:
    for form in (f"{name}.gz", name.replace("-idx", ".idx")):
        (root / form).unlink(missing_ok=True)
    (root / name).write_bytes(encoded(array))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (NAMES[0], TRAIN[1:], "239 images, .* 240 labels"),
        (NAMES[0], LABELS, "expected images with 3"),
        (NAMES[1], TRAIN, "expected labels with 1"),
        (NAMES[1], LABELS + 1, "has the label 4, but source.class_names has names for 0 to 3"),
        (NAMES[1], LABELS // 3 * 3, "classes 1, 2 have no image in train"),
        (NAMES[2], TEST[:, 1:], "train are 6 x 5 pixels, but those of test 5 x 5"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(root: Path, name: str, array: np.ndarray, message: str) -> None:
    replaced(root, name, array)
    with pytest.raises(ValueError, match=message):
        read(source(root))


def test_another_set_does_not_get_the_names_of_fashion_mnist(root: Path) -> None:
    """But one of clothes may have the names of its classes."""
    of = source(root, name=IdxSource.model_fields["name"].default)
    with pytest.raises(ValueError, match=r"not Fashion-MNIST's labels. Set source.name and source.class_names"):
        idx.listing(of, located(of))
    with pytest.raises(ValueError, match="class_names: name the classes of MNIST"):
        IdxSource(kind="idx", name="MNIST")
    own = source(root, class_names=IdxSource.model_fields["class_names"].default, classes=(0, 1, 2, 3))
    assert idx.listing(own, located(own)).class_names[0] == "T-shirt/top"


# ---- the recipe's side


def test_a_missing_file_says_how_to_get_it(root: Path) -> None:
    (root / NAMES[3]).unlink()
    with pytest.raises(RecipeError, match=rf"{NAMES[3]}, gzipped or not; expected {NAMES[0]}, .*apt-get install"):
        source_files(source(root))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classes": (1, 4)}, "classes: 4 is not from 0 to 3"),
        ({"classes": (1, -1)}, "classes: -1 is not from 0 to 3"),
        ({"classes": (1, 1)}, "contains duplicates"),
        ({"classes": (1,)}, "at least 2"),
        ({"class_names": ("a", "a")}, "contains duplicates"),
    ],
)
def test_classes_that_can_not_be_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source(Path("/nowhere"), **fields)


def test_where_files_lie_and_the_order_of_classes_do_not_enter_the_key() -> None:
    from pipelines.identity import identity_fields

    one, other = source(Path("/a"), classes=(3, 1)), source(Path("/b"), classes=(1, 3))
    assert identity_fields(one) == identity_fields(other)
    assert identity_fields(one) != identity_fields(source(Path("/a")))


@needs_files
def test_the_recipe_is_as_it_says() -> None:
    stages = load_pipeline("fashion").stages
    seen, heldout = stages["seen"].source.selected(), stages["heldout"].source.selected()  # type: ignore[union-attr]
    assert sorted([*seen, *heldout]) == list(range(10)) and heldout == (2, 4, 6)
