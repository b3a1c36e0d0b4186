"""The loader: the same batches whoever reads, from wherever, with whatever damage; and nothing decoded twice."""

import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from pipelines.files.hashing import cache_folder
from pipelines.store import FileEntry, Store, open_store
from ray_jobs.augment import RandomCrop, crops
from ray_jobs.data import reading
from ray_jobs.data.cache import Cache
from ray_jobs.data.columns import Sample
from ray_jobs.data.loader import Batch, Loader
from ray_jobs.data.sampler import Sampler
from ray_jobs.data.shards import Dataset, Images, ImageSize, open_artifact, open_dataset
from tests.support import datasets
from tests.support.records import make_manifest
from tests.support.s3 import Bucket, Server, used
from vit_model.contract import Preprocessing
from vit_model.preprocessing import decode_image, load_image

N, SIDE = 60, 24
COLOUR = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, resolution=SIDE, channels=3)
GREY = Preprocessing(mean=(0.5,), std=(0.5,), resolution=8, channels=1)


IDS = datasets.identities(N)


def photographs() -> list[Sample]:
    """JPEGs and PNGs of several sizes, smooth, so that resizers differ little."""
    rng, samples = np.random.default_rng(0), []
    for number in range(N):
        width, height = (int(side) for side in rng.integers(30, 90, 2))
        small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
        file, form = io.BytesIO(), "PNG" if number % 5 == 0 else "JPEG"
        small.resize((width, height), Image.Resampling.BICUBIC).save(file, form)
        name = IDS[number]
        samples.append(Sample(name, name, file.getvalue(), form.lower(), width, height, 3, number % 7))
    return samples


PHOTOGRAPHS = photographs()
PIXELS = np.random.default_rng(1).integers(0, 256, (N, 8, 8, 1), np.uint8)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("files")
    classes = [str(number) for number in range(7)]
    datasets.put(folder, "files", classes, None, {"train": PHOTOGRAPHS}, per_shard=25, row_group_bytes=8000)
    return open_dataset(folder)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("raw")
    samples = [datasets.raw(IDS[i], pixels, i % 7) for i, pixels in enumerate(PIXELS)]
    image = ImageSize(height=8, width=8, channels=1)
    datasets.put(folder, "raw", [str(i) for i in range(7)], image, {"train": samples}, per_shard=25)
    return open_dataset(folder)


def copied(batch: Batch) -> tuple[np.ndarray, ...]:
    return batch.positions, batch.images.numpy().copy(), batch.labels.numpy()


def make_loader(
    data: Dataset,
    preprocessing: Preprocessing,
    *,
    rows: pa.Table | None = None,
    crop: RandomCrop | None = None,
    threads: int = 2,
    state: dict[str, object] | None = None,
    **stream: object,
) -> Loader:
    """Of train, or of some rows, in batches of twelve; where another was left, if that one's state is given."""
    images = Images(data, data.index("train") if rows is None else rows)
    sampler = Sampler(images, **{"seed": 0, "batch_size": 12} | stream)
    loader = Loader(images, sampler, preprocessing, crop=crop, threads=threads)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def stream(data: Dataset, preprocessing: Preprocessing, steps: int, **changes: object) -> tuple[np.ndarray, ...]:
    """(positions, images, labels) of the global batches, the ranks' parts joined."""
    world = changes.get("world", 1)
    ranks = []
    for rank in range(world):
        with make_loader(data, preprocessing, rank=rank, **changes) as batches:
            taken = [copied(batch) for batch in islice(batches, steps)]
        ranks.append([np.stack(parts) for parts in zip(*taken, strict=True)])
    return tuple(np.concatenate(parts, axis=1) for parts in zip(*ranks, strict=True))


def assert_same(one: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...]) -> None:
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


WAYS = {
    "raw": ("raw", GREY, {}),
    "kept in memory": ("files", COLOUR, {}),
    "decoded each time": ("files", COLOUR, {"crop": RandomCrop("crop_flip", 0)}),
    "windows": ("files", COLOUR, {"crop": RandomCrop("crop_flip", 0), "order": "window"}),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[Dataset, Preprocessing, dict[str, object]]:
    name, preprocessing, given = request.param
    return request.getfixturevalue(name), preprocessing, given


# ---- what is in a batch


def test_raw_pixels_come_with_their_labels(raw: Dataset) -> None:
    _, images, labels = stream(raw, GREY, 5)
    rows = [np.flatnonzero((image == PIXELS).all(axis=(1, 2, 3))).item() for image in images.reshape(-1, 8, 8, 1)]
    assert sorted(rows) == list(range(N)), "five batches of twelve are an epoch of sixty"
    assert (np.array(rows) % 7).tolist() == labels.ravel().tolist()


def test_uncropped_files_are_what_load_image_makes(files: Dataset) -> None:
    _, images, labels = stream(files, COLOUR, 5)
    expected = {load_image(sample.image, COLOUR).tobytes(): sample.label for sample in PHOTOGRAPHS}
    assert [expected[image.tobytes()] for image in images.reshape(N, -1)] == labels.ravel().tolist()
    assert len({image.tobytes() for image in images.reshape(N, -1)}) == N


def test_crops_are_parts_of_the_originals(files: Dataset) -> None:
    """Pillow's crop and resize of Pillow's pixels: two levels apart, or a few where a JPEG was decoded at a half."""
    positions, images, labels = stream(files, COLOUR, 8, crop=RandomCrop("crop_flip", 3), seed=3)
    order = Sampler(Images(files, files.index("train")), seed=3, batch_size=12).order
    rows = np.concatenate([order.rows(each) for each in positions])
    every, found = images.reshape(-1, SIDE, SIDE, 3), []
    for row, position, image, label in zip(rows, positions.ravel(), every, labels.ravel(), strict=True):
        sample = PHOTOGRAPHS[row]
        one = crops("crop_flip", 3, np.array([position]), sample.height, sample.width)
        top, left, height, width, flipped = (part[0].item() for part in one)
        halved = sample.format == "jpeg" and min(height, width) >= 2 * SIDE
        if halved:  # then the part is of whole pixels of the half
            top, left, height, width = (number // 2 * 2 for number in (top, left, height, width))
        original = Image.fromarray(decode_image(sample.image, 3)).crop((left, top, left + width, top + height))
        expected = np.asarray(original.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        assert label == sample.label
        apart = np.abs((expected[:, ::-1] if flipped else expected).astype(int) - image)
        found.append(halved)
        assert apart.mean() < 4 if halved else apart.max() <= 2
    assert 3 < sum(found) < N - 10


# ---- the same for everybody


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"world": 2}, {"world": 4}, {"threads": 1}, {"threads": 5}], ids=str)
def test_batches_are_the_same_for_any_world_and_threads(way, changes: dict[str, object]) -> None:
    data, preprocessing, given = way
    assert_same(stream(data, preprocessing, 7, **given, **changes), stream(data, preprocessing, 7, **given))


def test_another_loader_goes_on_where_one_was_left(way) -> None:
    data, preprocessing, given = way
    whole = stream(data, preprocessing, 9, **given)
    with make_loader(data, preprocessing, **given) as batches:
        for _ in range(4):
            next(batches)
        state = batches.state_dict()
    assert state == {
        "fingerprint": data.info.content_digest,
        "seed": 0,
        "order": given.get("order", "global"),
        "batch_size": 12,
        "samples": 48,
    }, "counted when handed out, not when decoded"
    assert json.loads(json.dumps(state)) == state
    rest = stream(data, preprocessing, 5, state=state, **given)
    assert_same(rest, tuple(part[4:] for part in whole))
    # in another size of batch, the same samples follow
    if given.get("order") != "window":
        halves = stream(data, preprocessing, 10, state=state, **given | {"batch_size": 6})
        assert_same(tuple(part.reshape(-1) for part in halves), tuple(part.reshape(-1) for part in rest))


def test_a_loader_that_has_begun_goes_back_to_a_state(way) -> None:
    data, preprocessing, given = way
    with make_loader(data, preprocessing, **given) as batches:
        state = batches.state_dict()
        first = [copied(next(batches)) for _ in range(3)]
        batches.load_state_dict(state)
        for expected in first:
            assert_same(copied(next(batches)), expected)


def test_a_state_of_something_else_is_refused(raw: Dataset) -> None:
    with make_loader(raw, GREY, order="window") as batches:
        state = batches.state_dict()
        for change in ({"fingerprint": "other"}, {"seed": 1}, {"order": "global"}, {"batch_size": 6}):
            with pytest.raises(ValueError, match="cannot resume the loader"):
                batches.load_state_dict(state | change)


def test_a_batch_stays_until_the_next_is_asked_for(files: Dataset) -> None:
    expected = stream(files, COLOUR, 8, crop=RandomCrop("crop_flip", 0))[1]
    with make_loader(files, COLOUR, crop=RandomCrop("crop_flip", 0)) as batches:
        for images in expected:
            batch = next(batches)
            for _ in range(3):  # while threads decode the following ones
                np.testing.assert_array_equal(batch.images.numpy(), images)
                torch.zeros(200, 200) @ torch.zeros(200, 200)


def test_rows_may_be_some_of_several_splits(files: Dataset) -> None:
    some = pa.concat_tables([files.index("train")[40:50], files.index("train")[:2]])
    with make_loader(files, COLOUR, rows=some, threads=1) as batches:
        labels = sorted(next(batches).labels.tolist())
    assert labels == sorted(some["label"].to_pylist())


# ---- damage


def damage(data: Dataset, rows: list[int], tmp_path: Path) -> Dataset:
    """A copy of the dataset, with a bit flipped in each of these images."""
    copy = open_dataset(shutil.copytree(data.folder, tmp_path / "copy"))
    datasets.damage(copy, rows)
    return copy


def test_damaged_images_are_replaced_by_the_next_counted_and_told(way, tmp_path: Path, capsys) -> None:
    data, preprocessing, given = way
    whole = stream(data, preprocessing, 5, **given)
    copy = damage(data, [7, 30, 31], tmp_path)
    rows = copy.index("train")
    with make_loader(copy, preprocessing, **given) as batches:
        order = [batches._sampler.order.rows(next(batches).positions) for _ in range(5)]
        assert batches.metrics()["substitutes"] == 3
    said = capsys.readouterr().out
    for key in rows["key"].take([7, 30, 31]).to_pylist():
        assert f"image {key!r} has other bytes than at ingest" in said
    # the same everywhere, and nothing else changes
    found = [stream(copy, preprocessing, 5, **given, world=world) for world in (1, 2)]
    assert_same(*found)
    ok = ~np.isin(np.concatenate(order).reshape(5, 12), [7, 30, 31])
    np.testing.assert_array_equal(found[0][1][ok], whole[1][ok])
    labels = dict(zip(np.concatenate(order).tolist(), found[0][2].ravel().tolist(), strict=True))
    assert [labels[row] for row in (7, 30, 31)] == [8 % 7, 32 % 7, 32 % 7]


def test_too_much_damage_ends_the_training(way, tmp_path: Path) -> None:
    data, preprocessing, given = way
    copy = damage(data, list(range(20, 40)), tmp_path)
    with pytest.raises(ValueError, match=r"\d+ of \d+ images were damaged"):
        stream(copy, preprocessing, 5, **given)


def test_a_shard_that_is_not_there_is_no_damage_to_be_borne(way, tmp_path: Path) -> None:
    data, preprocessing, given = way
    copy = damage(data, [], tmp_path)
    (copy.folder / copy.info.shards[1].file).unlink()
    with pytest.raises(ValueError, match=r"00001\.parquet is missing or damaged"):
        stream(copy, preprocessing, 5, **given)


# ---- S3


@pytest.fixture
def server(moto: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with used(moto, monkeypatch):
        yield moto


def uploaded(data: Dataset, bucket: Bucket) -> tuple[Store, tuple[FileEntry, ...]]:
    store = open_store(f"s3://{bucket.name}/store")
    with store.staging(make_manifest().folder) as staging:
        shutil.copytree(data.folder, staging.path, dirs_exist_ok=True)
    return store, staging.files


def test_batches_from_s3_are_those_from_disk(way, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 5000)
    data, preprocessing, given = way
    expected = stream(data, preprocessing, 7, **given)
    store, entries = uploaded(data, server.bucket())
    remote = open_artifact(store, make_manifest(files=entries))
    assert not list(remote.folder.rglob("shards/*")), "only the index was fetched"
    for world in (1, 2):
        assert_same(stream(remote, preprocessing, 7, **given, world=world), expected)
    with make_loader(remote, preprocessing, **given) as batches:
        next(batches)
        assert batches.metrics()["cache_hits"] > 0
    np.testing.assert_array_equal(
        remote.images("train", preprocessing, [3, 50, 2]), data.images("train", preprocessing, [3, 50, 2])
    )


def test_a_damaged_piece_of_the_cache_is_fetched_again(files: Dataset, server: Server) -> None:
    store, entries = uploaded(files, server.bucket())
    given = {"crop": RandomCrop("crop_flip", 0)}
    expected = stream(files, COLOUR, 5, **given)
    remote = open_artifact(store, make_manifest(files=entries))
    assert_same(stream(remote, COLOUR, 5, **given), expected)
    cached = [path for path in (cache_folder() / "ranges").rglob("*") if path.is_file()]
    assert len(cached) == 3, "one piece a shard"
    for path in cached:
        path.write_bytes(path.read_bytes()[:-1500] + b"?" * 1500)
    with make_loader(remote, COLOUR, **given) as batches:
        assert_same(tuple(map(np.stack, zip(*map(copied, islice(batches, 5)), strict=True))), expected)
        assert batches.metrics()["substitutes"] == 0
        assert batches.metrics()["fetched_bytes"] > 3000


def test_an_empty_piece_of_the_cache_is_fetched_again(raw: Dataset, server: Server) -> None:
    store, entries = uploaded(raw, server.bucket())
    expected = stream(raw, GREY, 5)
    remote = open_artifact(store, make_manifest(files=entries))
    assert_same(stream(remote, GREY, 5), expected)
    for path in (cache_folder() / "ranges").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")  # as a loss of power may leave it
    assert_same(stream(open_artifact(store, make_manifest(files=entries)), GREY, 5), expected)


def test_a_shard_that_is_not_on_s3_is_named_and_asked_for_again(raw: Dataset, server: Server) -> None:
    bucket = server.bucket()
    store, entries = uploaded(raw, bucket)
    remote = open_artifact(store, make_manifest(files=entries))
    key = f"store/{make_manifest().folder}/{raw.info.shards[0].file}"
    body = server.client.get_object(Bucket=bucket.name, Key=key)["Body"].read()
    server.client.delete_object(Bucket=bucket.name, Key=key)
    with closing(remote.reader(remote.index("train"))) as reader:
        (row, *_) = np.flatnonzero(reader.shard == 0).tolist()
        reader.fetch(np.array([row]))
        with pytest.raises(ValueError, match=r"00000\.parquet is missing or damaged"):
            reader.read(row)
        server.client.put_object(Bucket=bucket.name, Key=key, Body=body)
        assert reader.read(row)


def test_a_cache_that_is_too_small_is_refused(files: Dataset, server: Server) -> None:
    store, entries = uploaded(files, server.bucket())
    remote = open_artifact(store, make_manifest(files=entries), cache_bytes=2000)
    for order, advice in (("global", "order: window"), ("window", "one window")):
        with pytest.raises(ValueError, match=f"cache_gib .* is less than the .* GiB .*{advice}"):
            make_loader(remote, COLOUR, order=order)


def test_the_cache_keeps_to_its_budget_and_lets_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache, fetched = Cache(2500), []

    def use(name: str) -> bytes:
        file = cache.open(name, lambda: fetched.append(name) or name.encode() * 1000)
        time.sleep(0.01)  # times of use differ
        return os.pread(file.number, 10_000, 0)

    assert [use(name) for name in ("a", "b", "a", "c")] == [
        b"a" * 1000,
        b"b" * 1000,
        b"a" * 1000,
        b"c" * 1000,
    ]
    assert use("a") == b"a" * 1000 and fetched == ["a", "b", "c"], "b was used longest ago"
    use("b")
    assert fetched == ["a", "b", "c", "b"]
    assert sum(path.stat().st_size for path in cache.folder.rglob("*")) <= 2500 + 4096
    held = cache.open("d", lambda: b"d" * 2000)
    use("e"), use("f")
    assert os.pread(held.number, 10_000, 0) == b"d" * 2000, "who reads it still has it"
