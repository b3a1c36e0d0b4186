"""Parquet as Hugging Face's datasets ships it, written here by pyarrow with the metadata by hand."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.files.sources import source_files
from pipelines.spec import HfParquetSource
from ray_jobs.ingesting.parts import plan_parts
from ray_jobs.ingesting.splits import assign_splits
from ray_jobs.sources import catalog
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.readers import hf_parquet
from ray_jobs.sources.readers.features import choose_column
from ray_jobs.sources.readers.folder import arrange
from tests.support.archives import image
from tests.support.prepared import HF_FEATURES, put_parquet
from vit_model.errors import UserError


def source(root: Path, **fields: object) -> tuple[HfParquetSource, Files]:
    made = HfParquetSource(kind="hf_parquet", root=str(root), **fields)
    return made, {name: str(path) for name, path in source_files(made).items()}


def listed(root: Path, **fields: object) -> Listing:
    return catalog.listing(*source(root, **fields))


def images_of(root: Path, listing: Listing) -> dict[str, bytes | ValueError]:
    """As ingest reads them: part by part."""
    given, files = source(root)
    found: dict[str, bytes | ValueError] = {}
    for part in plan_parts(listing.entries):
        entries = getattr(part, "entries", part)
        found |= zip(entries["key"].to_pylist(), catalog.images(given, files, entries), strict=True)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for shard in range(2):
        images = [image(10 * shard + number) for number in range(10)]
        put_parquet(tmp_path / f"train-{shard:05d}-of-00002.parquet", images, [number % 3 for number in range(10)])
    put_parquet(
        tmp_path / "validation-00000-of-00001.parquet",
        [image(50, "PNG", "L"), image(51)],
        [2, 0],
        reverse=True,
        compression="none",
    )
    return tmp_path


def test_images_labels_and_splits_are_those_of_the_files(root: Path) -> None:
    found = listed(root)
    assert found.class_names == ("cat", "dog", "fox") and not found.notes
    rows = {row["key"]: row for row in found.entries.to_pylist()}
    assert len(rows) == 22
    images = images_of(root, found)
    for shard in range(2):
        for number in range(10):
            key = f"train-{shard:05d}-of-00002/{number:07d}"
            assert (rows[key]["label"], rows[key]["split"]) == (number % 3, "train")
            assert images[key] == image(10 * shard + number)
    assert rows["validation-00000-of-00001/0000000"]["split"] == "dev"
    assert images["validation-00000-of-00001/0000000"] == image(50, "PNG", "L")


def test_a_column_says_what_stays_together(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    patients = [number % 5 for number in range(20)]
    put_parquet(path, [image(number) for number in range(20)], [number % 3 for number in range(20)])
    plain = pq.read_table(path)
    pq.write_table(plain.append_column("patient", pa.array(patients)), path, row_group_size=4)
    assert listed(tmp_path).notes == (
        "column 'patient' has 5 values for 20 images; with source.group: patient, the images of each stay in one split",
    )
    found = listed(tmp_path, group="patient")
    assert not found.notes
    assert found.entries["group"].to_pylist() == [str(patient) for patient in patients]
    assert listed(tmp_path).entries["group"].null_count == 20
    drawn = found.entries.append_column("content_id", found.entries["key"])
    splits = assign_splits(drawn, "salt", [None])
    assert len(set(zip(patients, splits, strict=True))) == 5
    for column, message in (
        (None, "has no column 'patient'; columns: image, label"),
        (pa.array([0.5] * 20), "is double, not whole numbers or text"),
        (pa.array([*patients[:19], None]), "row 19 of data.parquet has no patient"),
    ):
        pq.write_table(plain if column is None else plain.append_column("patient", column), path)
        with pytest.raises(ValueError, match=f"^source.group: .*{message}"):
            listed(tmp_path, group="patient")


def test_a_row_group_stays_in_one_part_and_in_sequence(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_jobs.ingesting.parts.SHARD_IMAGES", 3)
    entries = listed(root).entries
    parts = [getattr(part, "entries", part) for part in plan_parts(entries)]
    assert len(parts) > 2
    runs = []
    for part in parts:
        units = part["unit"].to_pylist()
        runs += [unit for unit, before in zip(units, [None, *units], strict=False) if unit != before]
    assert len(runs) == len(set(runs)) == 7  # row groups of at most 4 rows: 3 + 3 + 1
    keys = [key for part in parts for key in part["key"].to_pylist()]
    assert sorted(keys) == sorted(entries["key"].to_pylist())
    of_group = [key for key in keys if key < "train-00000-of-00002/0000004"]
    assert len(of_group) == 4 and of_group != sorted(of_group)  # a group's images are shuffled, too


def test_a_large_row_group_is_read_in_several_passes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = images_of(root, listed(root))
    monkeypatch.setattr(hf_parquet, "IN_MEMORY", 3000)
    assert images_of(root, listed(root)) == whole


@pytest.mark.slow
def test_batches_of_a_row_group_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of struct<bytes, path>, pyarrow reads no batch of 2 GiB. A dictionary hides how many bytes the images have."""
    pixels, asked, read = bytes(36 * 2**10), set(), pq.ParquetFile.iter_batches
    put_parquet(tmp_path / "train.parquet", [pixels] * 64, [0, 1] * 32, rows=64, compression="zstd", plain=False)
    assert (tmp_path / "train.parquet").stat().st_size < 10_000

    def iter_batches(file: pq.ParquetFile, rows: int, **fields: Any) -> Any:
        asked.add(rows)
        return read(file, rows, **fields)

    given, files = source(tmp_path)
    entries = listed(tmp_path).entries
    monkeypatch.setattr(hf_parquet, "IN_MEMORY", 2**19)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    assert [image == pixels for image in catalog.images(given, files, entries)] == [True] * 64
    assert 1 < max(asked) <= 2**19 // len(pixels)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (pa.ArrowNotImplementedError("nested"), r"train\.parquet, row group 0: pyarrow cannot read it: nested"),
        (MemoryError("full"), "full"),
        (OSError(5, "Input/output error"), "Input/output error"),
    ],
)
def test_a_failure_of_the_reader_is_not_the_images_damage(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_cell: object) -> bytes:
        raise error

    put_parquet(tmp_path / "train.parquet", [image(0), image(1)], [0, 1])
    found = listed(tmp_path)
    monkeypatch.setattr(hf_parquet, "_image", fail)
    with pytest.raises((UserError, MemoryError, OSError), match=message):
        images_of(tmp_path, found)


def test_an_image_that_is_only_a_path_is_refused(tmp_path: Path) -> None:
    put_parquet(tmp_path / "train.parquet", [image(0), None, b""], [0, 1, 2])
    images = images_of(tmp_path, listed(tmp_path))
    assert images["train/0000000"] == image(0) and images["train/0000002"] == b""
    with pytest.raises(ValueError, match="only names its path"):
        raise images["train/0000001"]  # type: ignore[misc]


def test_files_of_other_programs(tmp_path: Path) -> None:
    """No metadata, plain binary, text labels, splits by folders."""
    for split, seed in (("train", 0), ("test", 5)):
        (tmp_path / split).mkdir()
        columns = {"jpg": [image(seed), image(seed + 1)], "label": ["b", "a"], "width": [24, 24]}
        pq.write_table(pa.table(columns), tmp_path / split / "0000.parquet")
    found = listed(tmp_path)
    assert found.class_names == ("a", "b")
    assert sorted(zip(*(found.entries[name].to_pylist() for name in ("key", "label", "split")), strict=True)) == [
        ("test/0000/0000000", 1, "test"),
        ("test/0000/0000001", 0, "test"),
        ("train/0000/0000000", 1, "train"),
        ("train/0000/0000001", 0, "train"),
    ]
    assert images_of(tmp_path, found)["test/0000/0000001"] == image(6)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (pa.array(["b", "a", "b"], pa.large_string()), ("a", "b")),
        (pa.array(["b", "a", "b"], pa.string_view()), ("a", "b")),
        (pa.array(["b", "a", "b"]).dictionary_encode(), ("a", "b")),
        (pa.array([7, 3, 7]).dictionary_encode(), ("3", "7")),
        (pa.array([True, False, True]), ("false", "true")),
        (pa.array(["caf\u00e9", "b", "cafe\u0301"]), ("b", "caf\u00e9")),
    ],
)
@pytest.mark.parametrize("binary", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_text_of_any_library_is_text(
    values: pa.Array, names: tuple[str, ...], binary: pa.DataType, tmp_path: Path
) -> None:
    """pandas 3 writes large_string, polars string_view, and both write dictionaries for categories."""
    images = pa.array([image(number) for number in range(3)], binary)
    pq.write_table(pa.table({"image": images, "label": values, "site": values}), tmp_path / "0.parquet")
    found = listed(tmp_path, group="site")
    assert found.class_names == names and found.entries["label"].to_pylist() == [1, 0, 1]
    groups = found.entries["group"].to_pylist()
    assert groups[0] == groups[2] != groups[1]
    assert images_of(tmp_path, found)["0/0000001"] == image(1)


@pytest.mark.parametrize("labels", [[1000000, 7, 7], [7, 3, 3], [9, 10, 9], [5, 5, 5]])
def test_numbers_without_names_are_the_classes_that_occur(labels: list[int], tmp_path: Path) -> None:
    put_parquet(tmp_path / "train.parquet", [image(n) for n in range(3)], labels, features=None)
    found = listed(tmp_path)
    values = sorted(set(labels))
    assert found.class_names == tuple(map(str, values))
    assert found.entries["label"].to_pylist() == [values.index(label) for label in labels]
    [note] = found.notes
    assert note.startswith("column 'label': no class names are given and the labels are not 0, 1, 2")


def test_names_that_are_given_stay_and_numbers_from_0_need_none(tmp_path: Path) -> None:
    put_parquet(tmp_path / "train.parquet", [image(0), image(1)], [2, 0])
    found = listed(tmp_path)
    assert found.class_names == ("cat", "dog", "fox") and not found.notes
    assert found.entries["label"].to_pylist() == [2, 0]
    put_parquet(tmp_path / "train.parquet", [image(0), image(1)], [1, 0], features=None)
    found = listed(tmp_path)
    assert found.class_names == ("0", "1") and not found.notes
    put_parquet(tmp_path / "train.parquet", [image(0), image(1)], [1, -3], features=None)
    with pytest.raises(ValueError, match="the label -3 is negative"):
        listed(tmp_path)
    put_parquet(tmp_path / "train.parquet", [image(0), image(1)], ["cat", "no label"], features=None)
    with pytest.raises(ValueError, match="column 'label': 'no label' looks like a mark for images without a label"):
        listed(tmp_path)


def test_what_has_no_label_or_no_known_split_is_left_out_and_said(root: Path) -> None:
    put_parquet(root / "test-00000-of-00001.parquet", [image(70), image(71), image(72)], [-1, 1, None])
    put_parquet(root / "unsupervised-00000-of-00001.parquet", [image(80)], [-1])
    found = listed(root)
    assert found.entries["split"].to_pylist().count("test") == 1
    assert found.notes == (
        "1 file left out, because other files name a split (train, val, test) and these do not: "
        "unsupervised-00000-of-00001.parquet",
        "2 images without a label are left out",
    )


@pytest.mark.parametrize(
    ("name", "column", "refused"),
    [
        ("partition", ["train", "Test", "train"], True),
        ("partition", ["train", "later", "test"], True),
        ("is_train", [True, False, True], True),
        ("split", [0, 1, 2], True),
        ("partition", ["train"] * 3, False),
        ("partition", ["train", "a", None], False),
        ("male", [0, 1, 1], False),
        ("is_train", [7, 8, 9], False),
    ],
)
def test_a_column_of_splits_is_refused(name: str, column: list[object], refused: bool, tmp_path: Path) -> None:
    """In tables of labels, too."""
    images = [image(number) for number in range(3)]
    columns = {"image": images, "label": ["cat", "dog", "Cat "], name: column}
    pq.write_table(pa.table(columns), tmp_path / "images.parquet")
    rows = [{"file_name": f"{n}.jpg", "label": f"c{n}", name: cell} for n, cell in enumerate(column)]
    table = "\n".join(map(json.dumps, rows)).encode()
    with pytest.raises(UserError, match=r"names splits|unknown split '0'") if refused else nullcontext():
        assert len(arrange("root", ["0.jpg", "1.jpg", "2.jpg"], {"metadata.jsonl": table}).entries) == 3
    if refused:
        with pytest.raises(UserError, match=f"column '{name}' names splits, but a file's split is in its name"):
            listed(tmp_path)
    else:
        assert listed(tmp_path).notes[0].startswith("classes whose names differ only in case, spaces")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("imagefolder-train", "imagefolder-test"),
        ("food101-train-00000-of-00001", "food101-validation.v2-00000-of-00001"),
        ("train_0", "Testing 0"),
        ("data_train", "my-eval/0"),
        ("a/0-trainset", "a/holdout"),
    ],
)
def test_a_split_is_a_word_anywhere_in_the_name(train: str, test: str, tmp_path: Path) -> None:
    for name, seed in ((train, 0), (test, 5), (f"{train.rpartition('/')[0]}/other".strip("/"), 7)):
        put_parquet(tmp_path / f"{name}.parquet", [image(seed), image(seed + 1)], [0, 1])
    found = listed(tmp_path)
    assert {row["split"] for row in found.entries.to_pylist() if row["file"] == f"{train}.parquet"} == {"train"}
    assert {row["split"] for row in found.entries.to_pylist() if row["file"] == f"{test}.parquet"} <= {"test", "dev"}
    assert len(found.entries) == 4
    assert found.notes[-1].startswith("1 file left out, because other files name a split")
    assert found.notes[-1].endswith("other.parquet")


def test_files_that_name_no_split_leave_it_to_be_drawn(tmp_path: Path) -> None:
    put_parquet(tmp_path / "images.parquet", [image(0), image(1)], [0, 1])
    assert listed(tmp_path).entries["split"].to_pylist() == [None, None]


def change(root: Path, case: str) -> None:
    match case:
        case "part":
            (root / "train-00000-of-00002.parquet").unlink()
        case "folders":
            put_parquet(root / "other" / "train-00000-of-00001.parquet", [image(0)], [0])
        case "label":
            put_parquet(root / "test-00000-of-00001.parquet", [image(0)], [7])
        case "classes":
            features = HF_FEATURES | {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}
            put_parquet(root / "test-00000-of-00001.parquet", [image(0)], [0], features=features)
        case "column":
            put_parquet(root / "test-00000-of-00001.parquet", [image(0)], [0], features=None, column="picture")
        case "floats":
            put_parquet(root / "test-00000-of-00001.parquet", [image(0)], [0.5], features=None)
        case "no Parquet":
            (root / "test-00000-of-00001.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
        case "name in a row group":
            path = root / "validation-00000-of-00001.parquet"
            data = bytearray(path.read_bytes())
            data[data.rindex(b"label", 0, data.index(b"huggingface"))] = 0xFF
            path.write_bytes(data)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("part", r"train-00000-of-00002\.parquet is missing"),
        ("folders", r"several folders \(\., other\); set source\.root"),
        ("label", "the label 7 is not one of 3 classes"),
        ("classes", "its columns or classes differ"),
        ("column", "its columns or classes differ"),
        ("floats", "is double, not whole numbers or text"),
        ("no Parquet", "is not a Parquet file, or damaged"),
        ("name in a row group", r"validation-00000-of-00001\.parquet is damaged: a row group names a column"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(root: Path, case: str, message: str) -> None:
    change(root, case)
    with pytest.raises(UserError, match=message):
        listed(root)


def test_columns_can_be_named(root: Path) -> None:
    with pytest.raises(ValueError, match="no column 'photo' of images"):
        listed(root, image="photo")
    with pytest.raises(ValueError, match=r"source\.label: there is no column .*; name one of these columns: label"):
        listed(root, label="klass")
    with pytest.raises(ValueError, match=r"source\.image: it cannot be inferred; .* columns: there are none$"):
        choose_column("image", None, (), ())


def test_a_damaged_row_group_costs_its_own_images_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    put_parquet(path, [image(number) for number in range(8)], [number % 3 for number in range(8)], compression="none")
    data = bytearray(path.read_bytes())
    data[data.index(image(2)) + 100] ^= 1
    path.write_bytes(data)
    images = images_of(tmp_path, listed(tmp_path))
    assert [isinstance(images[f"train/{number:07d}"], ValueError) for number in range(8)] == [True] * 4 + [False] * 4
    assert "its row group can't be read" in str(images["train/0000001"])
