"""Shards: plain Parquet, byte-exact offsets, the same bytes every time, damage that is noticed."""

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_jobs import shards
from ray_jobs.shards import DatasetInfo, ImageSize, Sample, Shard, open_dataset
from vit_model.config import Preprocessing
from vit_model.preprocessing import load_image

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (50, 8, 8, 1), np.uint8)


def raw_samples() -> list[Sample]:
    return [
        Sample(f"id{i:02d}", f"row {i}", image.tobytes(), "raw", 8, 8, 1, i % 3)
        for i, image in enumerate(PIXELS)
    ]


def file_samples(n: int = 40) -> list[Sample]:
    samples = []
    for i in range(n):
        width, height = (int(side) for side in RNG.integers(10, 60, 2))
        file = io.BytesIO()
        form = "JPEG" if i % 2 else "PNG"
        Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8)).save(file, form)
        samples.append(Sample(f"id{i}", f"{i}.x", file.getvalue(), form.lower(), width, height, 3, i % 2))
    return samples


def dataset(folder: Path, parts: list[list[Sample]], image: ImageSize | None, group_bytes: int = 2**24):
    """A dataset whose train split has one shard for each part."""
    made = []
    for number, part in enumerate(parts):
        file = shards.shard_file("train", number)
        made.append(
            Shard(split="train", file=file, rows=shards.write_shard(folder / file, part, group_bytes))
        )
    splits = {"train": sum(shard.rows for shard in made), "dev": 0, "test": 0}
    info = DatasetInfo(
        name="x",
        class_names=("a", "b", "c"),
        image=image,
        splits=splits,
        shards=tuple(made),
        content_digest="0",
    )
    shards.write_info(folder, info)
    return open_dataset(folder)


def raw_dataset(folder: Path):
    samples = raw_samples()
    return dataset(folder, [samples[:30], samples[30:]], ImageSize(height=8, width=8, channels=1), 640)


def grey(resolution: int) -> Preprocessing:
    return Preprocessing(mean=(0.5,), std=(0.5,), resolution=resolution, channels=1)


def colour(resolution: int) -> Preprocessing:
    return Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, resolution=resolution, channels=3)


# ---- the file


def test_plain_pyarrow_reads_it_and_each_row_group_is_one_page(tmp_path: Path) -> None:
    samples = file_samples()
    assert shards.write_shard(tmp_path / "x.parquet", samples, 20_000) == len(samples)
    assert [Sample(**row) for row in pq.read_table(tmp_path / "x.parquet").to_pylist()] == samples
    groups = pq.ParquetFile(tmp_path / "x.parquet").metadata
    assert groups.num_row_groups > 1
    sizes = [groups.row_group(i).column(2).total_uncompressed_size for i in range(groups.num_row_groups - 1)]
    assert all(20_000 <= size < 20_000 + max(len(s.image) + 100 for s in samples) + 500 for size in sizes)


@pytest.mark.parametrize("samples", [raw_samples() * 1000, file_samples()], ids=["50,000 raw", "files"])
def test_images_lie_verbatim_at_offsets_that_follow_from_their_lengths(
    tmp_path: Path, samples: list[Sample]
) -> None:
    path = tmp_path / "x.parquet"
    shards.write_shard(path, samples, 2**21)
    data, metadata, row = path.read_bytes(), pq.ParquetFile(path).metadata, 0
    for group in range(metadata.num_row_groups):
        column = metadata.row_group(group).column(2)
        assert column.path_in_schema == "image"
        rows = samples[row : row + metadata.row_group(group).num_rows]
        header = column.total_compressed_size - sum(4 + len(sample.image) for sample in rows)
        assert header < 50  # one page only
        place = column.data_page_offset + header
        for sample in rows:
            place += 4
            assert data[place : place + len(sample.image)] == sample.image
            place += len(sample.image)
        assert place == column.data_page_offset + column.total_compressed_size
        row += len(rows)
    assert row == len(samples)


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    samples = file_samples()
    shards.write_shard(tmp_path / "a.parquet", samples, 10_000)
    shards.write_shard(tmp_path / "b.parquet", iter(samples), 10_000)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_a_raw_image_of_another_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="raw image 'row 0' has 63 bytes, its size needs 64"):
        shards.write_shard(tmp_path / "x", [raw_samples()[0]._replace(image=b"0" * 63)])


# ---- reading


def test_raw_images_labels_and_ids_come_back_in_order(tmp_path: Path) -> None:
    data = raw_dataset(tmp_path)
    np.testing.assert_array_equal(data.images("train", grey(8)), PIXELS)
    np.testing.assert_array_equal(data.labels("train"), np.arange(50) % 3)
    assert data.sample_ids("train") == [f"id{i:02d}" for i in range(50)]
    indices = np.array([49, 0, 7, 7, 30, 29])
    np.testing.assert_array_equal(data.images("train", grey(8), indices), PIXELS[indices])
    assert data.images("train", grey(8), []).shape == (0, 8, 8, 1)
    assert data.images("dev", grey(8)).shape == (0, 8, 8, 1) and data.labels("dev").shape == (0,)


def test_raw_images_are_resized_where_the_model_wants_another_size(tmp_path: Path) -> None:
    images = raw_dataset(tmp_path).images("train", colour(16), [3, 1])
    np.testing.assert_array_equal(images, np.stack([load_image(PIXELS[i], colour(16)) for i in (3, 1)]))


def test_files_are_decoded_as_load_image_does(tmp_path: Path) -> None:
    samples = file_samples()
    data = dataset(tmp_path, [samples[:25], samples[25:]], None, 20_000)
    images = data.images("train", colour(24))
    np.testing.assert_array_equal(images, np.stack([load_image(s.image, colour(24)) for s in samples]))
    np.testing.assert_array_equal(data.images("train", colour(24), [39, 0, 26]), images[[39, 0, 26]])


def test_labels_need_no_image_bytes(tmp_path: Path) -> None:
    """The label column is read alone: damage in the images goes unnoticed by it."""
    data = raw_dataset(tmp_path)
    path = tmp_path / data.info.shards[0].file
    content = path.read_bytes().replace(PIXELS[2].tobytes(), bytes(64))
    path.write_bytes(content)
    assert len(data.labels("train")) == 50


def test_a_flipped_bit_in_an_image_is_noticed_and_named(tmp_path: Path) -> None:
    data = raw_dataset(tmp_path)
    path = tmp_path / data.info.shards[1].file
    content = bytearray(path.read_bytes())
    content[content.index(PIXELS[45].tobytes()) + 17] ^= 1
    path.write_bytes(content)
    assert len(data.images("train", grey(8), np.arange(30))) == 30
    with pytest.raises(ValueError, match=r"train-00001\.parquet is missing or damaged"):
        data.images("train", grey(8))


def test_missing_cut_and_exchanged_shards_are_named(tmp_path: Path) -> None:
    data = raw_dataset(tmp_path)
    first, second = (tmp_path / shard.file for shard in data.info.shards)
    content = second.read_bytes()
    second.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"train-00001\.parquet is missing or damaged"):
        data.labels("train")
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=r"train-00001\.parquet has 30 rows, dataset\.json says 20"):
        data.labels("train")
    second.unlink()
    with pytest.raises(ValueError, match=r"train-00001\.parquet is missing or damaged"):
        data.sample_ids("train")


def test_what_cannot_be_read_says_so_beforehand(tmp_path: Path) -> None:
    data = raw_dataset(tmp_path)
    with pytest.raises(ValueError, match="of split 'train', which has 50 images"):
        data.images("train", grey(8), [50])
    with pytest.raises(ValueError, match="GiB of memory are free: use a lower resolution"):
        data.images("train", colour(2_000_000))
    with pytest.raises(ValueError, match=r"has no dataset\.json"):
        open_dataset(tmp_path / "shards")


# ---- dataset.json


def test_info_survives_writing_and_is_checked(tmp_path: Path) -> None:
    info = raw_dataset(tmp_path).info
    assert open_dataset(tmp_path).info == info
    path = tmp_path / "dataset.json"
    good = path.read_text()
    for old, new in (
        ('"train": 50', '"train": 51'),
        ("shards/train-00000", "shards/../../x"),
        ('"name"', '"nam"'),
    ):
        assert old in good
        path.write_text(good.replace(old, new))
        with pytest.raises(ValueError, match="damaged or of another version"):
            open_dataset(tmp_path)


def test_content_digest_covers_ids_labels_splits_and_classes_in_any_order() -> None:
    samples = [("a", 0, "train"), ("b", 1, "test")]
    digest = shards.content_digest("set", samples, ["x", "y"])
    assert shards.content_digest("set", samples[::-1], ["x", "y"]) == digest
    others = [
        shards.content_digest("set", [("a", 0, "train"), ("b", 0, "test")], ["x", "y"]),
        shards.content_digest("set", [("a", 0, "dev"), ("b", 1, "test")], ["x", "y"]),
        shards.content_digest("set", [("c", 0, "train"), ("b", 1, "test")], ["x", "y"]),
        shards.content_digest("set", samples[:1], ["x", "y"]),
        shards.content_digest("set", samples, ["y", "x"]),
        shards.content_digest("other", samples, ["x", "y"]),
    ]
    assert len({digest, *others}) == 7


def test_shuffling_mixes_samples_that_came_class_by_class() -> None:
    ids = [f"{i:04d}" for i in range(1000)]
    order = sorted(range(1000), key=lambda i: shards.shuffle_key(ids[i]))
    assert 400 < np.mean(order[:100]) < 600
