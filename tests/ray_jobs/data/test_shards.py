"""Shards: plain Parquet, byte-exact offsets, the same bytes every time, damage that is noticed."""

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_jobs.data import writing
from ray_jobs.data.columns import Sample
from ray_jobs.data.shards import ImageSize, open_dataset
from tests.support import datasets
from vit_model.contract import Preprocessing
from vit_model.preprocessing import load_image

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (50, 8, 8, 1), np.uint8)
IDS = datasets.identities(50)


def raw_samples() -> list[Sample]:
    return [Sample(IDS[i], f"row {i}", image.tobytes(), "raw", 8, 8, 1, i % 3) for i, image in enumerate(PIXELS)]


def file_samples(n: int = 40) -> list[Sample]:
    samples = []
    for i in range(n):
        width, height = (int(side) for side in RNG.integers(10, 60, 2))
        file = io.BytesIO()
        form = "JPEG" if i % 2 else "PNG"
        Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8)).save(file, form)
        samples.append(Sample(IDS[i], f"{i}.x", file.getvalue(), form.lower(), width, height, 3, i % 2))
    return samples


def dataset(folder: Path, samples: list[Sample], image: ImageSize | None, per_shard: int, group_bytes: int = 2**24):
    """A dataset of these samples in train."""
    splits = {"train": samples}
    datasets.put(folder, "x", ("a", "b", "c"), image, splits, per_shard=per_shard, row_group_bytes=group_bytes)
    return open_dataset(folder)


def raw_dataset(folder: Path):
    return dataset(folder, raw_samples(), ImageSize(height=8, width=8, channels=1), 30, 640)


def grey(resolution: int) -> Preprocessing:
    return Preprocessing(mean=(0.5,), std=(0.5,), resolution=resolution, channels=1)


def colour(resolution: int) -> Preprocessing:
    return Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, resolution=resolution, channels=3)


# ---- the file


def test_plain_pyarrow_reads_it_and_each_row_group_is_one_page(tmp_path: Path) -> None:
    samples = file_samples()
    assert len(writing.write_shard(tmp_path / "x.parquet", samples, 20_000)) == len(samples)
    assert [Sample(**row) for row in pq.read_table(tmp_path / "x.parquet").to_pylist()] == samples
    groups = pq.ParquetFile(tmp_path / "x.parquet").metadata
    assert groups.num_row_groups > 1
    sizes = [groups.row_group(i).column(2).total_uncompressed_size for i in range(groups.num_row_groups - 1)]
    assert all(20_000 <= size < 20_000 + max(len(s.image) + 100 for s in samples) + 500 for size in sizes)


@pytest.mark.parametrize("samples", [raw_samples() * 1000, file_samples()], ids=["50,000 raw", "files"])
def test_images_lie_verbatim_at_the_offsets_that_writing_returns(tmp_path: Path, samples: list[Sample]) -> None:
    path = tmp_path / "x.parquet"
    offsets = writing.write_shard(path, samples, 2**21)
    data = path.read_bytes()
    for sample, offset in zip(samples, offsets, strict=True):
        assert data[offset : offset + len(sample.image)] == sample.image


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    samples = file_samples()
    writing.write_shard(tmp_path / "a.parquet", samples, 10_000)
    writing.write_shard(tmp_path / "b.parquet", iter(samples), 10_000)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


# ---- reading


def test_raw_images_labels_and_ids_come_back_in_order(tmp_path: Path) -> None:
    data = raw_dataset(tmp_path)
    np.testing.assert_array_equal(data.images("train", grey(8)), PIXELS)
    np.testing.assert_array_equal(data.labels("train"), np.arange(50) % 3)
    assert data.sample_ids("train") == IDS
    indices = np.array([49, 0, 7, 7, 30, 29])
    np.testing.assert_array_equal(data.images("train", grey(8), indices), PIXELS[indices])
    assert data.images("train", grey(8), []).shape == (0, 8, 8, 1)
    assert data.images("dev", grey(8)).shape == (0, 8, 8, 1) and data.labels("dev").shape == (0,)


def test_raw_images_are_resized_where_the_model_wants_another_size(tmp_path: Path) -> None:
    images = raw_dataset(tmp_path).images("train", colour(16), [3, 1])
    np.testing.assert_array_equal(images, np.stack([load_image(PIXELS[i], colour(16)) for i in (3, 1)]))


def test_files_are_decoded_as_load_image_does(tmp_path: Path) -> None:
    samples = file_samples()
    data = dataset(tmp_path, samples, None, 25, 20_000)
    images = data.images("train", colour(24))
    np.testing.assert_array_equal(images, np.stack([load_image(s.image, colour(24)) for s in samples]))
    np.testing.assert_array_equal(data.images("train", colour(24), [39, 0, 26]), images[[39, 0, 26]])


def test_a_flipped_bit_in_an_image_is_noticed_and_named(tmp_path: Path) -> None:
    data = raw_dataset(tmp_path)
    path = tmp_path / data.info.shards[1].file
    content = bytearray(path.read_bytes())
    content[content.index(PIXELS[45].tobytes()) + 17] ^= 1
    path.write_bytes(content)
    assert len(data.images("train", grey(8), np.arange(30))) == 30
    with pytest.raises(ValueError, match=r"00001\.parquet is missing or damaged"):
        data.images("train", grey(8))


def test_missing_cut_and_exchanged_files_are_named(tmp_path: Path) -> None:
    data = raw_dataset(tmp_path)
    first, second = (tmp_path / shard.file for shard in data.info.shards)
    for damage in (second.read_bytes()[:200], first.read_bytes(), None):
        if damage is None:
            second.unlink()
        else:
            second.write_bytes(damage)
        with pytest.raises(ValueError, match=r"00001\.parquet is missing or damaged"):
            data.images("train", grey(8))
    index = tmp_path / "index.parquet"
    content = index.read_bytes()
    index.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"index\.parquet is missing or damaged"):
        open_dataset(tmp_path).labels("train")


def test_two_images_of_one_identity_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same key and the same bytes"):
        dataset(tmp_path, raw_samples()[:1] * 2, None, 30)


def test_what_cannot_be_read_says_so_beforehand(tmp_path: Path) -> None:
    data = raw_dataset(tmp_path)
    with pytest.raises(ValueError, match="GiB of memory are free: use a lower resolution"):
        data.images("train", colour(2_000_000))
    with pytest.raises(ValueError, match=r"does not contain dataset\.json"):
        open_dataset(tmp_path / "shards")


# ---- dataset.json


def test_info_survives_writing_and_is_checked(tmp_path: Path) -> None:
    info = raw_dataset(tmp_path).info
    assert open_dataset(tmp_path).info == info
    path = tmp_path / "dataset.json"
    good = path.read_text()
    for old, new in (
        ('"train": 50', '"training": 50'),
        ("shards/00000", "shards/../../x"),
        ('"name"', '"nam"'),
    ):
        assert old in good
        path.write_text(good.replace(old, new))
        with pytest.raises(ValueError, match="damaged or of another version"):
            open_dataset(tmp_path)


def test_content_digest_covers_ids_labels_splits_and_classes_in_any_order() -> None:
    samples = [("a", 0, "train", None), ("b", 1, "test", None)]
    digest = writing.content_digest("set", samples, ["x", "y"])
    assert writing.content_digest("set", samples[::-1], ["x", "y"]) == digest
    others = [
        writing.content_digest("set", [("a", 0, "train", None), ("b", 0, "test", None)], ["x", "y"]),
        writing.content_digest("set", [("a", 0, "dev", None), ("b", 1, "test", None)], ["x", "y"]),
        writing.content_digest("set", [("c", 0, "train", None), ("b", 1, "test", None)], ["x", "y"]),
        writing.content_digest("set", [samples[0], ("b", 1, "test", [])], ["x", "y"]),
        writing.content_digest("set", [samples[0], ("b", 1, "test", [0])], ["x", "y"]),
        writing.content_digest("set", samples[:1], ["x", "y"]),
        writing.content_digest("set", samples, ["y", "x"]),
        writing.content_digest("other", samples, ["x", "y"]),
    ]
    assert len({digest, *others}) == 9


def test_an_index_of_an_earlier_version_is_read_and_one_without_what_is_needed_is_refused(
    tmp_path: Path,
) -> None:
    data = raw_dataset(tmp_path)
    index = data.index("train")
    earlier = [name for name in index.schema.names if not name.startswith("phash_")]
    pq.write_table(index.select(earlier), tmp_path / "index.parquet")
    again = open_dataset(tmp_path)
    assert np.array_equal(again.images("train", grey(8)), data.images("train", grey(8)))
    pq.write_table(index.drop_columns(["content_id", "offset"]), tmp_path / "index.parquet")
    with pytest.raises(ValueError, match=r"index\.parquet: missing columns: content_id, offset"):
        open_dataset(tmp_path).labels("train")
