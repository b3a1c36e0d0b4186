"""The weights of a pretraining at each of its checkpoints: who names one gets these and nothing else is fetched."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.files.hashing import cache_folder
from pipelines.spec import Evaluate, NamedCheckpoint, RecipeError
from pipelines.store import FileEntry, Store, StoreDamaged, local_files, model_folder, open_store
from tests.support.checkpoints import model_at, put_pretraining
from tests.support.records import flip, make_context, make_manifest
from tests.support.s3 import Server, used


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "folder":
        yield open_store(str(tmp_path / "store"))
        return
    server: Server = request.getfixturevalue("moto")
    with used(server, monkeypatch):
        yield open_store(f"s3://{server.bucket().name}/prefix")


@pytest.mark.parametrize(("checkpoint", "step"), [("last", 20), ("best", 5), ("step:10", 10), ("step:20", 20)])
def test_a_stage_gets_the_weights_that_it_names_and_fetches_no_others(store: Store, checkpoint: str, step: int) -> None:
    import torch

    from vit_model.weights import load_model

    made = put_pretraining(store)
    config = Evaluate(job="evaluate", data="d", backbone=NamedCheckpoint(stage="p", checkpoint=checkpoint))
    context = make_context(store, config, data=make_manifest(), backbone=made)
    folder = context.input("backbone")
    assert context.input("backbone") == folder, "another task of the stage on this machine"
    found = load_model(folder)[0].state_dict()
    for name, tensor in model_at(step).state_dict().items():
        assert torch.equal(found[name], tensor), name
    fetched = [path.name for path in (cache_folder() / "objects").rglob("*") if path.is_file()]
    needed = ["config.json", "model.safetensors"]
    listed = ["checkpoints.json"] * (checkpoint != "last")
    assert sorted(fetched) == (sorted([*needed, *listed]) if store.uri.startswith("s3://") else [])


def test_who_reads_a_whole_artifact_does_not_fetch_the_weights_of_earlier_steps(store: Store) -> None:
    folder = local_files(store, put_pretraining(store))
    assert (folder / "model.safetensors").exists() and (folder / "curve.json").exists()
    assert (folder / "checkpoints").exists() is not store.uri.startswith("s3://")


def test_what_an_artifact_does_not_have_is_told_with_what_it_has(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    made = put_pretraining(store, best=None)
    old = make_manifest("pretrain", config={"steps": 20}, files=(FileEntry(path="x", size=1, sha256="0"),))
    for manifest, checkpoint, message in (
        (
            made,
            "step:6",
            r"was made without it and has step:5, step:10, step:20\..* with 6 in its keep_steps",
        ),
        (made, "best", "no dev split"),
        (old, "best", "an older version made it"),
        (old, "step:5", "was made without it and has step:20"),
        (make_manifest("import"), "best", r"s \(import k\) is not a pretraining and has one set of weights"),
        (made, "first", "'first' is not a checkpoint; expected last, best or step:N"),
    ):
        with pytest.raises(RecipeError, match=message):
            model_folder(store, manifest, checkpoint)


def test_damage_is_told(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    made = put_pretraining(store)
    folder = tmp_path / "store" / made.folder
    model_folder(store, made, "step:5")
    flip(folder / "checkpoints/5/model.safetensors")
    with pytest.raises(StoreDamaged, match=r"checkpoints/5/model\.safetensors is damaged"):
        model_folder(store, made, "step:5")
    assert model_folder(store, made, "step:10")
    other = put_pretraining(store, key="pb", best=7)
    with pytest.raises(StoreDamaged, match=r"checkpoints\.json is damaged .*best 7 is not one of the steps"):
        model_folder(store, other, "best")
