"""Every source, as its authors ship it, through the command line: datasets the first time, nothing to do the second."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipelines.spec.vtab import TASKS
from pipelines.store import Manifest, all_manifests, open_store
from ray_jobs.data.shards import Dataset, open_dataset
from tests.conftest import Vitflow
from tests.support.examples import EXAMPLES, Example, read
from tests.support.imagenet import REAL

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
def made(tmp_path_factory: pytest.TempPathFactory, vitflow_local: Vitflow) -> Made:
    """All sources as the stages of one recipe, which was run."""
    folder = tmp_path_factory.mktemp("sources")
    stages: dict[str, Any] = {
        example.name: {"job": "ingest", "source": example.put(folder / example.name), "max_bad_fraction": 0.2}
        for example in EXAMPLES
    }
    stages["scores"] = {"job": "baselines", "data": "imagenet", "methods": ["k-NN"]}
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"name": "sources", "description": "All there are.", "stages": stages}))
    vitflow_local("run", recipe, "--store", folder / "store")
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


def test_the_second_time_nothing_runs(made: Made, vitflow_local: Vitflow) -> None:
    again = vitflow_local("run", made.recipe, "--store", made.store, VITFLOW_RAY_DIR="/nonexistent")
    assert len(re.findall("CACHED", again.stdout)) == len(made.manifests)


@pytest.mark.parametrize("example", KINDS, ids=lambda example: example.name)
def test_a_dataset_has_the_images_and_labels_of_its_source(
    made: Made, example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entries, images = read(example.put(tmp_path / "files"))
    truth = {entry["key"]: (entry, image) for entry, image in zip(entries, images, strict=True)}
    found = stored(made, example.name)
    for key, (data, label, split) in found.items():
        entry, image = truth[key]
        assert data == (image if isinstance(image, bytes) else image.tobytes()) and label == entry["label"], key
        assert split == entry["split"] or entry["split"] in (None, "train"), key
    quarantine = pq.read_table(made.dataset(example.name).folder / "quarantine.parquet").to_pylist()
    copies = pq.read_table(made.dataset(example.name).folder / "duplicates.parquet").to_pylist()
    left_out = {row["key"] for row in copies if row["done"] == "left out"}
    assert {*found, *left_out, *(row["key"] for row in quarantine)} == truth.keys()
    if example.name == "parquet":
        assert [row["reason"] for row in quarantine] == [
            "truncated",
            "not in the file, which only names its path",
        ]


def test_imagenet_is_scored_by_its_own_labels_and_by_reals(made: Made) -> None:
    folder, dataset = made.store / made.manifests["scores"].folder, made.dataset("imagenet")
    rows = {row["task"]: row for row in pq.read_table(folder / "rows.parquet").to_pylist()}
    assert {task: row["num_images"] for task, row in rows.items()} == {
        "ImageNet-1k": 6,
        "ImageNet-1k (ReaL)": 4,
    }
    keys = dict(zip(dataset.sample_ids("test"), dataset.index("test")["key"].to_pylist(), strict=True))
    for task, row in rows.items():
        found = [p for p in pq.read_table(folder / "predictions.parquet").to_pylist() if p["task"] == task]
        for one in found:
            number = int(keys[one["sample_id"]].removeprefix("val/ILSVRC2012_val_").removesuffix(".JPEG"))
            known = REAL[number - 1] if "ReaL" in task else [one["label"]]
            assert known and one["correct"] == (one["prediction"] in known)
        assert row["value"] == pytest.approx(sum(one["correct"] for one in found) / row["num_images"])
