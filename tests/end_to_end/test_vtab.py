"""The VTAB recipe on small archives in their authors' formats: what is there is scored, what is not is named."""

import json
import re
from pathlib import Path

import pytest

from pipelines.spec.vtab import TASKS
from tests.conftest import Vitflow
from tests.support import vtab_natural
from tests.support.vits import TINY, contract_for, randomised
from vit_model.config import ViTConfig
from vit_model.weights import save_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]
THERE = ("dtd", "oxford_flowers102", "svhn")


def write_model(folder: Path) -> Path:
    """A small ViT with random weights, trained on nothing here."""
    config = ViTConfig.model_validate(TINY | {"image_size": 16, "num_classes": 2})
    folder.mkdir()
    save_model(folder, randomised(config), contract_for(config))
    return folder


def test_what_is_there_is_scored_and_what_is_not_is_named(tmp_path: Path, vitflow_local: Vitflow) -> None:
    from tests.support import vtab_archives

    root, store = tmp_path / "archives", ("--store", tmp_path / "s")
    for task in THERE:
        (root / task).mkdir(parents=True)
        for name, data in vtab_natural.natural(task).items():
            (root / task / name).write_bytes(data)
    recipe = ("vtab_fewshot", "--set", f"images.source.root={root}")
    recipe += ("--set", f"backbone.path={write_model(tmp_path / 'model')}", *store)

    plan = json.loads(vitflow_local("plan", *recipe, "--json").stdout)
    states = {row["stage"]: row["state"] for row in plan}
    missing = [task for task in TASKS if task not in THERE]
    assert {states[f"images@task={task}"] for task in missing} == {"missing"}
    assert {states[f"few_shot@task={task}"] for task in missing} == {"skipped"}
    assert {states[f"images@task={task}"] for task in THERE} == {"run"}

    done = vitflow_local("run", *recipe, check=1)
    for task in missing:
        assert f"images@task={task}" in done.stderr
    assert "CLEVR_v1.0.zip" in done.stdout, "which archive"
    shown = json.loads(vitflow_local("report", "show", *store, "--json").stdout)
    (score,) = [score for score in shown["vtab"] if score["trained"]]
    assert (score["method"], score["backbone"], score["covered"]) == ("ViT, pretrained", "backbone", 3)
    assert score["missing"] == [TASKS[task].title for task in missing]
    assert "mean over 3 of the 19 tasks" in " ".join(done.stdout.split())
    lines = {line["task"]: line for line in score["tasks"]}
    assert all(any("incomplete archive" in note for note in lines[task]["notes"]) for task in THERE)
    assert [column["labels_per_class"] for column in score["columns"]] == [1, 5, 10, 25, None]
    for number, column in enumerate(score["columns"]):
        values = [lines[task]["accuracies"][number] for task in THERE]
        assert column["mean"] == pytest.approx(sum(values) / 3)

    again = vitflow_local("run", *recipe, check=1, VITFLOW_RAY_DIR="/nonexistent")
    assert len(re.findall("CACHED", again.stdout)) == 2 * 3 + 2, "nothing runs"

    (root / "eurosat").mkdir()
    vtab_archives.eurosat(root / "eurosat")
    more = vitflow_local("run", *recipe, check=1)
    assert len(re.findall(r"SUCCEEDED", more.stdout)) == 3, "ingest, evaluation and report of what is new"
    assert "mean over 4 of the 19 tasks" in " ".join(more.stdout.split())
    groups = json.loads(
        vitflow_local(
            "report", "query", "SELECT DISTINCT vtab_group, task FROM rows ORDER BY ALL", *store, "--json"
        ).stdout
    )
    assert [(row["vtab_group"], row["task"]) for row in groups] == [
        ("natural", "DTD"),
        ("natural", "Flowers102"),
        ("natural", "SVHN"),
        ("specialized", "EuroSAT"),
    ]


def test_the_papers_protocol_and_the_linear_one(tmp_path: Path, vitflow_local: Vitflow) -> None:
    root, store = tmp_path / "archives", ("--store", tmp_path / "s")
    (root / "svhn").mkdir(parents=True)
    for name, data in vtab_natural.natural("svhn").items():
        (root / "svhn" / name).write_bytes(data)
    smaller = ["resolution=16", "steps=3", "batch_size=16", "optimizer.warmup_steps=0", "refits=2"]
    changes = ["images.matrix.source.task=[svhn]", f"images.source.root={root}"]
    changes += [f"backbone.path={write_model(tmp_path / 'model')}", *(f"finetune.{each}" for each in smaller)]
    vitflow_local("run", "vtab", *(part for change in changes for part in ("--set", change)), *store)

    shown = json.loads(vitflow_local("report", "show", *store, "--json").stdout)
    tuned, linear = (score for score in shown["vtab"] if score["trained"])
    assert (tuned["method"], tuned["draws"]) == ("ViT, pretrained, fine-tuned", 2)
    expected = ("ViT, pretrained, linear, dev", 1, "train+dev")
    assert (linear["method"], linear["covered"], linear["support"]) == expected
    sql = """SELECT task, protocol, draw, selected_on, settings FROM rows
             WHERE stage NOT LIKE 'report%' AND method = 'ViT, pretrained' ORDER BY ALL"""
    rows = json.loads(vitflow_local("report", "query", sql, *store, "--json").stdout)
    assert [(row["task"], row["protocol"], row["draw"]) for row in rows] == [
        ("SVHN", *kind) for kind in (("fine-tuning", 0), ("fine-tuning", 1), ("linear probe, dev", 0))
    ]
    assert {row["selected_on"] for row in rows} == {"nothing, one learning rate was given", "dev"}
    assert {json.loads(row["settings"]).get("augment") for row in rows} == {"squash_crop_flip", None}
    sql = "SELECT draw, list(prediction ORDER BY sample_id) AS said FROM predictions WHERE stage = 'finetune@task=svhn'"
    one, other = json.loads(vitflow_local("report", "query", f"{sql} GROUP BY draw", *store, "--json").stdout)
    assert one["said"] != other["said"], "each refit has its own seed"


def test_a_published_number_is_repeated_or_it_is_not(tmp_path: Path, vitflow_local: Vitflow) -> None:
    archives = tmp_path / "pets"
    archives.mkdir()
    for name, data in vtab_natural.natural("oxford_iiit_pet").items():
        (archives / name).write_bytes(data)
    command = ["verify-protocol", "augreg_b32_pets", archives, write_model(tmp_path / "model")]
    command += ["--store", tmp_path / "s"]
    for change in ("resolution=16", "steps=3", "batch_size=16", "optimizer.warmup_steps=0"):
        command += ["--set", f"pets_and_flowers.{change}"]
    wrong = vitflow_local(*command, "--published", "99.5", check=1).stdout
    assert "this is not the published protocol" in wrong
    mean = re.search(r"FAIL: ([\d.]+)% \(std [\d.]+ over 3 fine-tunings\), published 99.50%", wrong)
    assert mean is not None
    assert "PASS" in vitflow_local(*command, "--published", str(float(mean[1]) - 0.29)).stdout
    assert "FAIL" in vitflow_local(*command, "--published", str(float(mean[1]) + 0.31), check=1).stdout
    few = vitflow_local(*command, "--set", "pets_and_flowers.refits=2", check=2).stderr
    assert "refits 2: a mean of at least 3 fine-tunings is compared" in few
