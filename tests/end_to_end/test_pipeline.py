"""The tiny pipeline with every real part: Ray, DeepSpeed, Ray Tune, Parquet, the DAG."""

import contextlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.support.paths import TINY
from tests.support.records import flip

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def run(vitflow, store: Path, *more: str | Path, check: int = 0) -> str:  # type: ignore[no-untyped-def]
    done = vitflow("run", TINY, "--store", store, *more, check=check)
    return str(done.stdout)


def snapshot(store: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in store.rglob("*")}


def manifests(store: Path) -> dict[str, dict]:  # type: ignore[type-arg]
    found = [json.loads(path.read_text()) for path in store.glob("artifacts/*/*/manifest.json")]
    return {manifest["stage"]: manifest for manifest in found}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the tiny pipeline was run once."""
    import sys

    store = tmp_path_factory.mktemp("store")
    done = subprocess.run(
        [sys.executable, "-m", "pipelines", "run", str(TINY), "--store", str(store)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "report.html" in done.stdout
    return store


def test_every_stage_is_committed_with_its_files_and_its_log(finished: Path) -> None:
    import hashlib

    found = manifests(finished)
    assert set(found) == {"digits", "pretrain", "finetune", "probe", "pixels", "report"}
    for manifest in found.values():
        attempt = (
            finished / "artifacts" / manifest["job"] / manifest["key"] / "attempts" / str(manifest["attempt"])
        )
        files = {
            path.relative_to(attempt / "files").as_posix(): path
            for path in (attempt / "files").rglob("*")
            if path.is_file()
        }
        assert {file["path"] for file in manifest["files"]} == set(files), "every file, and no other"
        for file in manifest["files"]:
            assert hashlib.sha256(files[file["path"]].read_bytes()).hexdigest() == file["sha256"]
        assert f"committed {manifest['job']}" in (attempt / "log.txt").read_text()


def test_a_rerun_touches_nothing_and_imports_neither_torch_nor_ray(vitflow, finished: Path) -> None:  # type: ignore[no-untyped-def]
    before = snapshot(finished)
    done = vitflow("run", TINY, "--store", finished, PYTHONPROFILEIMPORTTIME="1")
    assert done.stdout.count("CACHED") == 6
    assert snapshot(finished) == before
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "ray", "numpy", "pyarrow"}


def test_a_changed_field_runs_its_stage_and_those_behind_it(vitflow, finished: Path) -> None:  # type: ignore[no-untyped-def]
    plan = json.loads(vitflow("plan", TINY, "--store", finished, "--set", "probe.draws=3", "--json").stdout)
    states = {row["stage"]: row["state"] for row in plan}
    assert states == {
        "digits": "cached",
        "pretrain": "cached",
        "finetune": "cached",
        "pixels": "cached",
        "probe": "run",
        "report": "pending",
    }
    assert next(row["why"] for row in plan if row["stage"] == "probe") == "draws 2 -> 3"


def test_an_execution_field_runs_nothing(vitflow, finished: Path) -> None:  # type: ignore[no-untyped-def]
    out = run(vitflow, finished, "--set", "pretrain.workers=1", "--set", "pretrain.threads=2")
    assert out.count("CACHED") == 6


def test_force_makes_a_successor_and_the_same_content_stops_there(vitflow, finished: Path) -> None:  # type: ignore[no-untyped-def]
    before = {path: path.read_bytes() for path in finished.glob("artifacts/*/*/manifest.json")}
    out = run(vitflow, finished, "--force", "digits", "--only", "pixels")
    assert all(path.read_bytes() == data for path, data in before.items()), "nothing is overwritten"
    assert len(list(finished.glob("artifacts/ingest/*/manifest.json"))) == 2
    assert re.search(r"digits +SUCCEEDED", out)
    assert re.search(r"pixels +CACHED", out), "the same content behind another key"


def test_a_damaged_input_ends_the_run_and_names_what_rebuilds_it(  # type: ignore[no-untyped-def]
    vitflow, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, store := tmp_path / "store")
    made = manifests(store)["digits"]
    folder = store / "artifacts" / "ingest" / made["key"] / "attempts" / "1" / "files"
    flip(folder / "index.parquet")
    again = ("--set", "probe.seed=77", "--only", "probe")
    done = run(vitflow, store, *again, check=1)
    rebuild = f"vitflow run {made['run'].rsplit('-', 3)[0]} --force digits --store {store}"
    assert "index.parquet is damaged: it has sha256" in done
    assert rebuild in done
    assert rebuild in vitflow("verify", made["key"], "--store", store, check=1).stdout
    run(vitflow, store, *again, "--force", "digits")
    assert "nothing is damaged" in vitflow("verify", "--store", finished).stdout


def test_two_stores_hold_the_same_bytes(vitflow, finished: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run(vitflow, tmp_path / "other")
    one, two = manifests(finished), manifests(tmp_path / "other")
    for stage in ("digits", "pretrain", "finetune", "probe", "pixels"):
        digests = [{file["path"]: file["sha256"] for file in found[stage]["files"]} for found in (one, two)]
        assert digests[0] == digests[1], stage
        assert one[stage]["content_digest"] == two[stage]["content_digest"]
    assert one["report"]["content_digest"] == two["report"]["content_digest"]


def test_looking_at_a_run(vitflow, finished: Path) -> None:  # type: ignore[no-untyped-def]
    run_row = json.loads(vitflow("list", "--store", finished, "--json").stdout)[0]
    assert run_row["status"] == "SUCCEEDED"
    status = json.loads(vitflow("status", run_row["run"], "--store", finished, "--json").stdout)
    assert {stage["status"] for stage in status["stages"]} <= {"SUCCEEDED", "CACHED"}
    logs = vitflow("logs", run_row["run"], "probe", "--store", finished).stdout
    assert "committed evaluate" in logs
    kinds = json.loads(vitflow("list", "--kind", "models", "--store", finished, "--json").stdout)
    assert {row["stage"] for row in kinds} == {"pretrain", "finetune"}
    report = json.loads(vitflow("report", "show", "--store", finished, "--json").stdout)
    assert report["title"] == "Tiny"
    assert "report.html" in vitflow("report", "list", "--store", finished).stdout


def test_a_models_predictions_are_those_of_its_evaluation(vitflow, finished: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """`predict` on the pixels of a test image says what the stage had predicted for it."""
    import pyarrow.parquet as pq

    manifest = manifests(finished)["finetune"]
    folder = (
        finished
        / "artifacts"
        / "finetune"
        / manifest["key"]
        / "attempts"
        / str(manifest["attempt"])
        / "files"
    )
    predictions = [
        row for row in pq.read_table(folder / "predictions.parquet").to_pylist() if row["draw"] == 0
    ]
    digits = manifests(finished)["digits"]
    shards = (
        finished
        / "artifacts"
        / "ingest"
        / digits["key"]
        / "attempts"
        / str(digits["attempt"])
        / "files"
        / "shards"
    )
    images = {row["sample_id"]: row["image"] for row in pq.read_table(shards / "00000.parquet").to_pylist()}
    files = []
    for row in predictions[:20]:
        files.append(tmp_path / f"{row['sample_id']}.png")
        Image.frombytes("L", (8, 8), images[row["sample_id"]]).save(files[-1])
    said = json.loads(vitflow("predict", manifest["key"][:12], *files, "--store", finished, "--json").stdout)
    same = [
        row["top"][0]["class"] == str(expected["prediction"])
        for row, expected in zip(said, predictions, strict=False)
    ]
    assert sum(same) >= 19, "one may differ where bfloat16 and float32 disagree on a near tie"


def test_a_stage_that_fails_by_the_users_mistake_is_not_repeated(vitflow, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """400 images of a class that has about 100: found when the data is there, told once, exit code 1."""
    images = tmp_path / "images"
    for label in ("a", "b"):
        (images / label).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (32, 32), (number * 20, 40, 90)).save(images / label / f"{number}.png")
        (images / label / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    vitflow("init", tmp_path / "mine.yaml", "--images", images)
    done = vitflow("run", tmp_path / "mine.yaml", "--store", tmp_path / "s", check=1)
    assert "2 of 18 images cannot be used" in done.stdout
    assert "a/broken.png" in done.stdout
    assert done.stdout.count("attempt 2") == 0
    assert "SKIPPED" in done.stdout


def test_your_own_images_from_init_to_predict(vitflow, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
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
    said = vitflow("init", recipe, "--images", images).stdout
    assert "121 images of 2 classes" in said
    assert "weak" in said
    vitflow("run", recipe, "--store", tmp_path / "s", "--set", "vit.steps=40", "--set", "vit.model.depth=2")
    dataset = manifests(tmp_path / "s")["images"]
    assert dataset["metrics"]["quarantined"] == 1
    model = manifests(tmp_path / "s")["vit"]
    said = json.loads(
        vitflow(
            "predict", model["key"][:10], images / "flower" / "3.jpg", "--store", tmp_path / "s", "--json"
        ).stdout
    )
    assert {top["class"] for top in said[0]["top"]} == {"china", "flower"}
    report = json.loads(vitflow("report", "show", "--store", tmp_path / "s", "--json").stdout)
    methods = {line["method"] for line in report["accuracies"]}
    assert {"majority", "k-NN", "logistic regression"} <= methods


def test_a_full_disk_is_one_clear_message(vitflow, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """On a file system of 2 MB, which only root can make: the stage fails once, and nothing is committed."""
    full = tmp_path / "full"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(full)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        store = full / "s"
        vitflow("run", TINY, "--store", store, "--only", "digits", "--set", "digits.max_bad_fraction=0.5")
        filler = full / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)) == 4096:
                pass
        os.truncate(filler, filler.stat().st_size - 65_536)  # room for a record, none for shards
        done = vitflow("run", TINY, "--store", store, "--only", "digits", check=1)
        assert "no space" in done.stdout + done.stderr
        assert "Traceback" not in done.stdout
        assert len(list(store.glob("artifacts/ingest/*/manifest.json"))) == 1
        filler.unlink()
        run(vitflow, store, "--only", "digits")
        assert len(list(store.glob("artifacts/ingest/*/manifest.json"))) == 2
    finally:
        subprocess.run(["umount", str(full)], check=True)
