"""Sources of records through the command line: a dataset the first time, nothing to do the second."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

from pipelines.spec import ShapesSource
from ray_jobs.shards import Dataset, open_dataset
from ray_jobs.sources.shapes import render
from tests.archives import image, tar
from tests.prepared import FORMATS, put_parquet, put_tfds
from tests.ray_jobs.test_cifar import batches, members

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def ingested(vitflow, folder: Path, source: dict[str, object]) -> Dataset:  # type: ignore[no-untyped-def]
    recipe = folder / "recipe.yaml"
    stages = {"images": {"job": "ingest", "source": source, "max_bad_fraction": 0.2}}
    recipe.write_text(yaml.safe_dump({"name": "records", "description": "One data set.", "stages": stages}))
    for _ in range(2):
        vitflow("run", recipe, "--store", folder / "store")
    (found,) = (folder / "store").glob("artifacts/ingest/*/attempts/*/files/dataset.json")
    return open_dataset(found.parent)


def stored(dataset: Dataset) -> dict[str, tuple[bytes, int, str]]:
    """key -> (bytes in the shard, label, split)."""
    shards = [pq.read_table(dataset.folder / shard.file) for shard in dataset.info.shards]
    images = pa.concat_tables(shards)
    found = dict(zip(images["key"].to_pylist(), images["image"].to_pylist(), strict=True))
    return {
        row["key"]: (found[row["key"]], row["label"], row["split"])
        for split in dataset.info.splits
        for row in dataset.index(split).select(["key", "label", "split"]).to_pylist()
    }


def test_hugging_face_parquet(vitflow, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = tmp_path / "data"
    for shard in range(2):
        images = [image(10 * shard + number) for number in range(10)]
        put_parquet(root / f"train-{shard:05d}-of-00002.parquet", images, [n % 3 for n in range(10)])
    bad = [image(50, "PNG", "L"), image(51)[:-100], None]
    put_parquet(root / "test-00000-of-00001.parquet", bad, [2, 0, 1])
    dataset = ingested(vitflow, tmp_path, {"kind": "hf_parquet", "root": str(root), "name": "toy"})
    found = stored(dataset)
    assert len(found) == 21 and dataset.info.class_names == ("cat", "dog", "fox")
    for shard in range(2):
        for number in range(10):
            data, label, split = found[f"train-{shard:05d}-of-00002/{number:07d}"]
            assert data == image(10 * shard + number) and label == number % 3 and split in ("train", "dev")
    assert found["test-00000-of-00001/0000000"] == (image(50, "PNG", "L"), 2, "test")
    quarantine = pq.read_table(dataset.folder / "quarantine.parquet").to_pylist()
    assert {row["key"]: row["reason"] for row in quarantine} == {
        "test-00000-of-00001/0000001": "truncated",
        "test-00000-of-00001/0000002": "not in the file, which only names its path",
    }


@pytest.mark.parametrize("form", FORMATS)
def test_tfds(vitflow, tmp_path: Path, form: str) -> None:  # type: ignore[no-untyped-def]
    root = tmp_path / "toy" / "1.0.0"
    root.mkdir(parents=True)
    put_tfds(root, form)
    dataset = ingested(vitflow, tmp_path, {"kind": "tfds", "root": str(root)})
    found = stored(dataset)
    assert dataset.info.splits == {"train": 9, "dev": 2, "test": 3}
    assert found["train/0000007"] == (image(7), 7 % 3, "train")
    assert found["test/0000002"] == (image(202), 202 % 3, "test")
    assert pc.all(pc.equal(dataset.index("train")["format"], "jpeg")).as_py()


def test_cifar(vitflow, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = tmp_path / "archives"
    root.mkdir()
    (root / "cifar-10-python.tar.gz").write_bytes(tar(members(10, "python"), "w:gz"))
    dataset = ingested(vitflow, tmp_path, {"kind": "cifar", "root": str(root)})
    *train, (_, test, test_labels) = batches(10)
    found = stored(dataset)
    number = 0
    for _, images, labels in train:
        for pixels, label in zip(images, labels, strict=True):
            data, found_label, split = found[f"train-{number:05d}"]
            assert data == pixels.tobytes() and found_label == label and split in ("train", "dev")
            number += 1
    assert found["test-00003"] == (test[3].tobytes(), test_labels[3], "test")
    assert dataset.info.name == "CIFAR-10" and dataset.info.splits["test"] == len(test)


def test_shapes(vitflow, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    fields = {"kind": "shapes", "label": "colour", "images": 200, "dev_images": 20, "test_images": 40}
    dataset = ingested(vitflow, tmp_path, fields)
    pixels, factors = render(ShapesSource.model_validate(fields), 230)
    assert stored(dataset)["shape-0000230"] == (pixels.tobytes(), factors["colour"], "test")
    assert dataset.info.splits == {"train": 200, "dev": 20, "test": 40}
