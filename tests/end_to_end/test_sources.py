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
from tests.conftest import Vitflow
from tests.support import imagenet, vtab_archives, vtab_natural
from tests.support.archives import image, rar, tar, zipped
from tests.support.cifar import PER_BATCH, batches, members
from tests.support.imagenet import REAL, WHOLE, synset
from tests.support.prepared import FORMATS, put_parquet, put_tfds
from tests.support.webdataset import shard

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]
CLASSES = {
    f"{name}/{i}.png": image(100 * len(name) + i, "PNG") for name in ("cat", "horse") for i in range(30)
}
LABELS = [i % 3 for i in range(24)]
BAD = [image(50, "PNG", "L"), image(51)[:-100], None]  # but the first


class Made(NamedTuple):
    """A recipe of all sources that was run: stage -> (source, how many images), stage -> its artifact."""

    recipe: Path
    store: Path
    sources: dict[str, tuple[dict[str, object], int]]
    manifests: dict[str, Manifest]

    def dataset(self, stage: str) -> Dataset:
        return open_dataset(self.store / self.manifests[stage].folder)


def put(root: Path) -> dict[str, tuple[dict[str, object], int]]:
    """Archives of every kind but VTAB's, below `root`: stage -> (its source, how many images it has)."""
    archives = {
        "folder": {"pets.zip": zipped(CLASSES)},
        "rar": {"pets.rar": rar(CLASSES)},
        "imagenet": imagenet.files() | {"real.json": json.dumps(REAL).encode()},
        "imagenet21k": {"whole.tar": tar({f"{wnid}.tar": synset(wnid, n) for wnid, n in WHOLE.items()})},
        "webdataset": {"train-000000.tar": tar(shard(LABELS))},
        "cifar10": {"cifar-10-python.tar.gz": tar(members(10, "python"), "w:gz")},
        "cifar100": {"cifar-100-binary.tar.gz": tar(members(100, "binary"), "w:gz")},
        "tfrecord": {},
        "array_record": {},
    }
    for name, files in archives.items():
        (root / name).mkdir(parents=True)
        for file, data in files.items():
            (root / name / file).write_bytes(data)
    put_parquet(root / "parquet" / "train-00000-of-00001.parquet", [image(i) for i in range(24)], LABELS)
    put_parquet(root / "parquet" / "test-00000-of-00001.parquet", BAD, [2, 0, 1])
    for form in FORMATS:
        put_tfds(root / form, form)

    def source(kind: str, place: str, **fields: object) -> dict[str, object]:
        return {"kind": kind, "root": str(root / place)} | fields

    return {
        "folder": (source("folder", "folder/pets.zip"), len(CLASSES)),
        "rar": (source("folder", "rar/pets.rar"), len(CLASSES)),
        "imagenet": (source("imagenet", "imagenet"), 4 * 30 + len(imagenet.TRUTH)),
        "imagenet21k": (source("imagenet21k", "imagenet21k/whole.tar", held_out=0.1), 12 + 40 + 25),
        "webdataset": (source("webdataset", "webdataset"), len(LABELS)),
        "parquet": (source("hf_parquet", "parquet"), len(LABELS) + 1),
        "tfrecord": (source("tfds", "tfrecord"), 9 + 2 + 3),
        "array_record": (source("tfds", "array_record"), 9 + 2 + 3),
        "cifar10": (source("cifar", "cifar10"), 6 * PER_BATCH),
        "cifar100": (source("cifar", "cifar100", classes=100), 6 * PER_BATCH),
        "shapes": (
            {"kind": "shapes", "label": "colour", "images": 200, "dev_images": 20, "test_images": 40},
            260,
        ),
    }


def put_vtab(root: Path) -> None:
    """The archives of all 19 tasks, each in a folder of its own."""
    for task in TASKS:
        (root / task).mkdir(parents=True)
        if task in vtab_archives.ARCHIVES:
            vtab_archives.ARCHIVES[task](root / task)
            continue
        for name, data in vtab_natural.natural(task).items():
            (root / task / name).write_bytes(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, vitflow_local: Vitflow) -> Made:
    """All sources as the stages of one recipe, which was run."""
    folder = tmp_path_factory.mktemp("sources")
    sources = put(folder / "archives")
    put_vtab(folder / "vtab")
    stages: dict[str, Any] = {
        name: {"job": "ingest", "source": source, "max_bad_fraction": 0.2}
        for name, (source, _) in sources.items()
    }
    vtab = {"kind": "vtab", "root": str(folder / "vtab")}
    stages["vtab"] = {"job": "ingest", "source": vtab, "matrix": {"source.task": list(TASKS)}}
    stages["scores"] = {"job": "baselines", "data": "imagenet", "methods": ["k-NN"]}
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"name": "sources", "description": "All there are.", "stages": stages}))
    vitflow_local("run", recipe, "--store", folder / "store")
    found = {one.stage: one for one in all_manifests(open_store(str(folder / "store")))}
    return Made(recipe, folder / "store", sources, found)


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
    assert made.manifests.keys() == {"scores", *made.sources, *(f"vtab@task={task}" for task in TASKS)}
    for name, (_, images) in made.sources.items():
        dataset = made.dataset(name)
        copies = pq.read_table(dataset.folder / "duplicates.parquet")["done"].to_pylist().count("left out")
        assert sum(dataset.info.splits.values()) + copies == images, name
        assert json.loads((dataset.folder / "card.json").read_text())["images"] == images - copies
        bad = pq.read_metadata(dataset.folder / "quarantine.parquet").num_rows
        assert bad == (len(BAD) - 1 if name == "parquet" else 0), name
    for task, facts in TASKS.items():
        info = made.dataset(f"vtab@task={task}").info
        assert info.name == facts.title and min(info.splits.values()) > 0, task
        assert any("incomplete archive" in note for note in info.notes), task


def test_the_second_time_nothing_runs(made: Made, vitflow_local: Vitflow) -> None:
    again = vitflow_local("run", made.recipe, "--store", made.store, VITFLOW_RAY_DIR="/nonexistent")
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
    source = ShapesSource.model_validate(made.sources["shapes"][0])
    pixels, factors = render(source, 230)
    assert stored(made, "shapes")["shape-0000230"] == (pixels.tobytes(), factors["colour"], "test")
    assert made.dataset("shapes").info.splits == {"train": 200, "dev": 20, "test": 40}
