"""Every source, as its authors ship it, through the command line: datasets the first time, nothing to do the second."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

from pipelines.spec import ShapesSource
from pipelines.spec.vtab import TASKS
from pipelines.store import Manifest, all_manifests, open_store
from ray_jobs.data.shards import Dataset, open_dataset
from ray_jobs.evaluation.rows import PREDICTIONS, ROWS, read_table
from ray_jobs.sources.readers.shapes import render
from tests.support.archives import image
from tests.support.cifar import batches
from tests.support.examples import EXAMPLES
from tests.support.examples.kinds import BAD, LABELS
from tests.support.imagenet import REAL
from tests.support.prepared import FORMATS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]
KINDS = [example for example in EXAMPLES if example.kind != "vtab"]


class Made(NamedTuple):
    """A recipe of all examples that was run: stage -> its artifact."""

    recipe: Path
    store: Path
    manifests: dict[str, Manifest]

    def dataset(self, stage: str) -> Dataset:
        return open_dataset(self.store / self.manifests[stage].folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, vitflow: Any) -> Made:
    """All sources as the stages of one recipe, which was run."""
    folder = tmp_path_factory.mktemp("sources")
    stages: dict[str, Any] = {
        example.name: {"job": "ingest", "source": example.put(folder / example.name), "max_bad_fraction": 0.2}
        for example in EXAMPLES
    }
    stages["scores"] = {"job": "baselines", "data": "imagenet", "methods": ["k-NN"]}
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"name": "sources", "description": "All there are.", "stages": stages}))
    vitflow("run", recipe, "--store", folder / "store")
    found = {one.stage: one for one in all_manifests(open_store(str(folder / "store")))}
    return Made(recipe, folder / "store", found)


def stored(made: Made, stage: str) -> dict[str, tuple[bytes, int, str]]:
    """key -> (bytes in the shard, label, split)."""
    dataset = made.dataset(stage)
    images = pa.concat_tables([pq.read_table(dataset.folder / shard.file) for shard in dataset.info.shards])
    found = dict(zip(images["key"].to_pylist(), images["image"].to_pylist(), strict=True))
    return {
        row["key"]: (found[row["key"]], row["label"], row["split"])
        for split in dataset.info.splits
        for row in dataset.index(split).select(["key", "label", "split"]).to_pylist()
    }


def test_every_source_becomes_a_dataset(made: Made) -> None:
    assert made.manifests.keys() == {"scores", *(example.name for example in EXAMPLES)}
    for example in KINDS:
        dataset = made.dataset(example.name)
        copies = pq.read_table(dataset.folder / "duplicates.parquet")["done"].to_pylist().count("left out")
        images = example.images if isinstance(example.images, int) else len(example.images)
        assert sum(dataset.info.splits.values()) + copies == images, example.name
        assert json.loads((dataset.folder / "card.json").read_text())["images"] == images - copies
        bad = pq.read_metadata(dataset.folder / "quarantine.parquet").num_rows
        assert bad == example.quarantined, example.name
    for task, facts in TASKS.items():
        info = made.dataset(task).info
        assert info.name == facts.title and min(info.splits.values()) > 0, task
        assert any("incomplete archive" in note for note in info.notes), task


def test_the_second_time_nothing_runs(made: Made, vitflow: Any) -> None:
    again = vitflow("run", made.recipe, "--store", made.store, VITFLOW_RAY_DIR="/nonexistent")
    assert len(re.findall("CACHED", again.stdout)) == len(made.manifests)


def test_hugging_face_parquet(made: Made) -> None:
    found = stored(made, "parquet")
    assert made.dataset("parquet").info.class_names == ("cat", "dog", "fox")
    for number, label in enumerate(LABELS):
        data, own, split = found[f"train-00000-of-00001/{number:07d}"]
        assert data == image(number) and own == label and split in ("train", "dev")
    assert found["test-00000-of-00001/0000000"] == (BAD[0], 2, "test")
    quarantine = pq.read_table(made.dataset("parquet").folder / "quarantine.parquet").to_pylist()
    assert {row["key"]: row["reason"] for row in quarantine} == {
        "test-00000-of-00001/0000001": "truncated",
        "test-00000-of-00001/0000002": "not in the file, which only names its path",
    }


@pytest.mark.parametrize("form", FORMATS)
def test_tfds(made: Made, form: str) -> None:
    found, dataset = stored(made, form), made.dataset(form)
    assert dataset.info.splits == {"train": 9, "dev": 2, "test": 3}
    assert found["train/0000007"] == (image(7), 7 % 3, "train")
    assert found["test/0000002"] == (image(202), 202 % 3, "test")
    assert pc.all(pc.equal(dataset.index("train")["format"], "jpeg")).as_py()


def test_cifar(made: Made) -> None:
    *train, (_, test, test_labels) = batches(10)
    found, info = stored(made, "cifar10"), made.dataset("cifar10").info
    number = 0
    for _, images, labels in train:
        for pixels, label in zip(images, labels, strict=True):
            data, found_label, split = found[f"train-{number:05d}"]
            assert data == pixels.tobytes() and found_label == label and split in ("train", "dev")
            number += 1
    assert found["test-00003"] == (test[3].tobytes(), test_labels[3], "test")
    assert info.name == "CIFAR-10" and info.splits["test"] == len(test)


def test_imagenet(made: Made) -> None:
    found, names = stored(made, "imagenet"), made.dataset("imagenet").info.class_names
    data, label, split = found["train/n02119789/n02119789_7.JPEG"]
    assert data == image(1007) and names[label].startswith("n02119789 ") and split in ("train", "dev")
    data, label, split = found["val/ILSVRC2012_val_00000002.JPEG"]
    assert data == image(9002) and names[label].startswith("n01440764 ") and split == "test"


def test_imagenet_is_scored_by_its_own_labels_and_by_reals(made: Made) -> None:
    folder, dataset = made.store / made.manifests["scores"].folder, made.dataset("imagenet")
    rows = {row["task"]: row for row in read_table(folder / "rows.parquet", ROWS)}
    assert {task: row["num_images"] for task, row in rows.items()} == {
        "ImageNet-1k": 6,
        "ImageNet-1k (ReaL)": 4,
    }
    keys = dict(zip(dataset.sample_ids("test"), dataset.index("test")["key"].to_pylist(), strict=True))
    for task, row in rows.items():
        found = [p for p in read_table(folder / "predictions.parquet", PREDICTIONS) if p["task"] == task]
        for one in found:
            number = int(keys[one["sample_id"]].removeprefix("val/ILSVRC2012_val_").removesuffix(".JPEG"))
            known = REAL[number - 1] if "ReaL" in task else [one["label"]]
            assert known and one["correct"] == (one["prediction"] in known)
        assert row["value"] == pytest.approx(sum(one["correct"] for one in found) / row["num_images"])


def test_shapes(made: Made) -> None:
    source = ShapesSource.model_validate(next(one.fields for one in KINDS if one.name == "shapes"))
    pixels, factors = render(source, 230)
    assert stored(made, "shapes")["shape-0000230"] == (pixels.tobytes(), factors["colour"], "test")
    assert made.dataset("shapes").info.splits == {"train": 200, "dev": 20, "test": 40}
