"""Stores of earlier layouts are read: `tests/scripts/keep_layout.py` keeps one before a layout changes."""

import json
from pathlib import Path
from zipfile import ZipFile

import pytest

from pipelines.recipe.load import load_pipeline
from pipelines.results.listing import KINDS
from pipelines.results.verify import verify
from pipelines.schedules.schedule import read_schedule
from pipelines.store import all_manifests, open_record, open_store, read_alias
from tests.conftest import Vitflow
from tests.support.paths import TINY

LAYOUTS = sorted(Path(__file__).with_name("layouts").glob("*.zip"))
STAGES = ["digits", "pretrain", "finetune", "probe", "pixels", "report"]


@pytest.mark.parametrize("archive", LAYOUTS, ids=lambda path: path.stem)
def test_a_store_of_an_earlier_layout_is_read(vitflow_here: Vitflow, tmp_path: Path, archive: Path) -> None:
    with ZipFile(archive) as kept:
        kept.extractall(tmp_path)

    def ask(*words: object) -> object:
        return json.loads(vitflow_here(*words, "--store", tmp_path, "--json").stdout)

    status = ask("status")
    assert isinstance(status, dict)
    assert status["status"] == "SUCCEEDED"
    assert sorted(stage["stage"] for stage in status["stages"]) == sorted(STAGES)
    listed = {kind: ask("list", "--kind", kind) for kind in KINDS}
    assert len(listed["datasets"]) == 1
    assert len(listed["models"]) == 2
    store = open_store(str(tmp_path), create=False)
    made = {manifest.stage: manifest for manifest in all_manifests(store)}
    lineage = ask("lineage", made["report"].key)
    assert isinstance(lineage, dict)
    assert {node["stage"] for node in lineage["nodes"]} == {*STAGES}
    versions = {name: stage.version for name, stage in load_pipeline(str(TINY)).stages.items()}
    plan = ask("plan", TINY)
    states = {stage["stage"]: stage["state"] for stage in plan}
    # a stage whose VERSION was raised since is made again, and so is what follows
    if all(made[name].code["version"] == version for name, version in versions.items()):
        assert states == dict.fromkeys(STAGES, "cached")
    alias, schedule = read_alias(store, "production"), read_schedule(store, "weekly")
    assert alias is not None and alias.target is not None and alias.target.key == made["pretrain"].key
    assert schedule is not None and schedule.pipeline.name == "tiny"
    assert open_record(store) is None
    assert not verify(store).damage
