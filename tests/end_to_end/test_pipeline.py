"""The tiny pipeline with every real part: Ray, DeepSpeed, Ray Tune, Parquet, the DAG."""

import csv
import json
import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Vitflow
from tests.support.paths import TINY
from tests.support.stores import files_of, manifests, snapshot

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def run(vitflow, store: Path, *more: str | Path, check: int = 0) -> str:  # type: ignore[no-untyped-def]
    done = vitflow("run", TINY, "--store", store, *more, check=check)
    return str(done.stdout)


def test_every_stage_is_committed_with_its_files_and_its_log(tiny_store: Path) -> None:
    committed = manifests(tiny_store)
    assert set(committed) == {"digits", "pretrain", "finetune", "probe", "pixels", "report"}
    for manifest in committed.values():
        folder = files_of(tiny_store, manifest)
        digests = {
            path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file()
        }
        assert {file["path"]: file["sha256"] for file in manifest["files"]} == digests, "each file, no other"
        assert f"committed {manifest['job']}" in (folder.parent / "log.txt").read_text()


def test_a_rerun_touches_nothing_and_imports_neither_torch_nor_ray(vitflow, tiny_store: Path) -> None:  # type: ignore[no-untyped-def]
    before = snapshot(tiny_store)
    done = vitflow("run", TINY, "--store", tiny_store, PYTHONPROFILEIMPORTTIME="1")
    assert done.stdout.count("CACHED") == 6
    assert snapshot(tiny_store) == before
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "ray", "numpy", "pyarrow"}


def test_a_pretraining_is_continued_with_another_objective_and_fine_tuned(
    vitflow_local: Vitflow, tiny_store: Path, tmp_path: Path
) -> None:
    """From the tiny recipe's own last model, at twice the resolution; the whole lineage is known, and it is cached."""
    shutil.copytree(tiny_store, store := tmp_path / "store")
    first = manifests(store)["pretrain"]
    changes = ("init_from=latest", "objective=masked_patches", "resolution=16", "workers=1", "steps=5")
    more = [*(part for change in changes for part in ("--set", f"pretrain.{change}")), "--only", "finetune"]
    run(vitflow_local, store, *more)
    made = [json.loads(path.read_text()) for path in store.glob("artifacts/*/*/manifest.json")]
    (tuned,) = (one for one in made if one["job"] == "finetune" and one["run"] != first["run"])
    (second,) = (one for one in made if one["key"] == tuned["inputs"]["backbone"][0]["key"])
    assert second["inputs"]["init_from"][0]["key"] == first["key"]
    assert json.loads((files_of(store, tuned) / "config.json").read_text())["architecture"]["image_size"] == 16
    lineage = vitflow_local("lineage", tuned["key"], "--store", store).stdout
    assert f"init_from: pretrain  pretrain {first['key'][:12]}" in lineage
    assert run(vitflow_local, store, *more).count("CACHED") == 3, "it does not continue its own result"


STUDENT = """
  student:
    job: pretrain
    data: digits
    objective: distillation
    teacher: finetune
    distillation: {kind: soft, temperature: 3.0}
    model: {patch_size: 4, width: 16, depth: 1, num_heads: 2, distillation: true}
    resolution: 8
    steps: 20
    batch_size: 32
    learning_rate: 1.0e-3
  exam:
    job: evaluate
    data: digits
    backbone: student
    shots: [5]
    draws: 2
"""


def test_a_student_learns_from_a_fine_tuned_teacher(vitflow_local: Vitflow, tiny_store: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_store, store := tmp_path / "store")
    (recipe := tmp_path / "tiny.yaml").write_text(TINY.read_text() + STUDENT)
    said = str(vitflow_local("run", recipe, "--store", store, "--only", "exam").stdout)
    assert re.search("exam +SUCCEEDED", said)
    made = manifests(store)
    teacher = made["finetune"]["key"]
    assert made["student"]["inputs"]["teacher"][0]["key"] == teacher
    contract = json.loads((files_of(store, made["student"]) / "config.json").read_text())
    assert contract["architecture"]["distillation"], "the token is kept"
    lineage = vitflow_local("lineage", made["exam"]["key"], "--store", store).stdout
    assert f"teacher: finetune  finetune {teacher[:12]}" in lineage
    refused = vitflow_local("plan", recipe, "--store", store, "--set", "student.resolution=16", check=2).stderr
    assert "stages.student.teacher: finetune" in refused


def test_looking_at_a_run(vitflow, tiny_store: Path) -> None:  # type: ignore[no-untyped-def]
    run_row = json.loads(vitflow("list", "--store", tiny_store, "--json").stdout)[0]
    assert run_row["status"] == "SUCCEEDED"
    status = json.loads(vitflow("status", run_row["run"], "--store", tiny_store, "--json").stdout)
    assert {stage["status"] for stage in status["stages"]} <= {"SUCCEEDED", "CACHED"}
    logs = vitflow("logs", run_row["run"], "probe", "--store", tiny_store).stdout
    assert "committed evaluate" in logs
    kinds = json.loads(vitflow("list", "--kind", "models", "--store", tiny_store, "--json").stdout)
    assert {row["stage"] for row in kinds} == {"pretrain", "finetune"}
    report = json.loads(vitflow("report", "show", "--store", tiny_store, "--json").stdout)
    assert report["title"] == "Tiny"
    assert "report.html" in vitflow("report", "list", "--store", tiny_store).stdout


def test_a_models_predictions_are_those_of_its_evaluation(
    vitflow_local: Vitflow, tiny_store: Path, tmp_path: Path
) -> None:
    """`predict` on the pixels of a test image says what the stage had predicted for it."""
    import pyarrow.parquet as pq

    made = manifests(tiny_store)
    rows = pq.read_table(files_of(tiny_store, made["finetune"]) / "predictions.parquet").to_pylist()
    predictions = [row for row in rows if row["draw"] == 0]
    shard = pq.read_table(files_of(tiny_store, made["digits"]) / "shards" / "00000.parquet")
    images = {row["sample_id"]: row["image"] for row in shard.to_pylist()}
    files = []
    for row in predictions[:20]:
        files.append(tmp_path / f"{row['sample_id']}.png")
        Image.frombytes("L", (8, 8), images[row["sample_id"]]).save(files[-1])
    said = json.loads(
        vitflow_local("predict", made["finetune"]["key"][:12], *files, "--store", tiny_store, "--json").stdout
    )
    same = [
        row["top"][0]["class"] == str(expected["prediction"]) for row, expected in zip(said, predictions, strict=False)
    ]
    assert sum(same) >= 19, "one may differ where bfloat16 and float32 disagree on a near tie"

    model = f"{made['finetune']['run']}/finetune"
    lines = csv.DictReader(
        vitflow_local("predict", model, "--split", "test", "--csv", "--store", tiny_store).stdout.splitlines()
    )
    said = {line["image"]: (line["label"], line["prediction"]) for line in lines}
    index = pq.read_table(files_of(tiny_store, made["digits"]) / "index.parquet", columns=["sample_id", "key"])
    keys = dict(zip(*(index[name].to_pylist() for name in ("sample_id", "key")), strict=True))
    stored = {keys[row["sample_id"]]: (str(row["label"]), str(row["prediction"])) for row in predictions}
    assert said.keys() == stored.keys()
    assert {key: label for key, (label, _) in said.items()} == {key: label for key, (label, _) in stored.items()}
    assert sum(said[key] == stored[key] for key in stored) >= 0.99 * len(stored)


def test_your_own_images_from_init_to_predict(vitflow_local: Vitflow, tmp_path: Path) -> None:
    """Colour photographs of two kinds, one of them damaged: quarantined, trained, reported, predicted."""
    import numpy as np
    from sklearn.datasets import load_sample_images

    images = tmp_path / "my images"
    rng = np.random.default_rng(0)
    for name, photograph in zip(("china", "flower"), load_sample_images().images, strict=True):
        (images / name).mkdir(parents=True)
        for number in range(60):
            top, left = rng.integers(0, 427 - 96), rng.integers(0, 640 - 96)
            crop = photograph[top : top + 96, left : left + 96]
            Image.fromarray(crop).save(images / name / f"{number}.jpg", quality=90)
    (images / "china" / "1000.jpg").write_bytes((images / "china" / "0.jpg").read_bytes()[:500])
    recipe = tmp_path / "mine.yaml"
    said = vitflow_local("init", recipe, "--images", images).stdout
    assert "121 images of 2 classes" in said
    assert "weak" in said
    vitflow_local("run", recipe, "--store", tmp_path / "s", "--set", "vit.steps=40", "--set", "vit.model.depth=2")
    dataset = manifests(tmp_path / "s")["images"]
    assert dataset["metrics"]["quarantined"] == 1
    model = manifests(tmp_path / "s")["vit"]
    said = json.loads(
        vitflow_local(
            "predict", model["key"][:10], images / "flower" / "3.jpg", "--store", tmp_path / "s", "--json"
        ).stdout
    )
    assert {top["class"] for top in said[0]["top"]} == {"china", "flower"}
    report = json.loads(vitflow_local("report", "show", "--store", tmp_path / "s", "--json").stdout)
    methods = {line["method"] for line in report["accuracies"]}
    assert {"most frequent class", "k-NN", "RBF SVM"} <= methods
