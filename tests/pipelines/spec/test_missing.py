"""A member of a matrix whose source is not there: it is named, the rest goes on, and the report says what it lacks."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from pipelines import store as st
from pipelines.engine import plan
from pipelines.recipe.load import load_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.spec import Finetune, RecipeError
from pipelines.spec.vtab import TASKS
from pipelines.store import open_store
from ray_jobs.training.optim import warmup_steps
from ray_jobs.tuning.points import points
from tests.support.records import make_manifest


def images(folder: Path) -> None:
    """Two classes that anybody can tell apart, in splits."""
    for split in ("train", "test"):
        for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
            (folder / split / name).mkdir(parents=True)
            for number in range(6):
                shade = tuple(max(0, part - 9 * number - (split == "test")) for part in colour)
                Image.new("RGB", (8, 8), shade).save(folder / split / name / f"{number}.png")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Baselines on three folders, of which `c` is not there."""
    for name in "ab":
        images(tmp_path / name)
    roots = [str(tmp_path / name) for name in "abc"]
    ingest = {"job": "ingest", "source": {"kind": "folder"}, "matrix": {"source.root": roots}}
    labels = {"per_class": 2, "draws": 1, "folds": 2}
    pixels = {"job": "baselines", "data": "images", "methods": ["majority"], "labels": labels, "thumbnail": 8}
    report = {"job": "report", "title": "Some", "of": ["images", "pixels"]}
    stages = {"images": ingest, "pixels": pixels, "report": report}
    path = tmp_path / "some.yaml"
    path.write_text(yaml.safe_dump({"name": "some", "stages": stages}))
    return path


def planned(pipeline: Pipeline, store: Any, *targets: str) -> dict[str, plan.PlannedStage]:
    names = pipeline.needed_for(targets or tuple(pipeline.stages))
    return {stage.name: stage for stage in plan.plan_pipeline(store, pipeline, names)}


def test_a_member_is_missing_and_what_takes_it_is_skipped_but_the_report(recipe: Path, tmp_path: Path) -> None:
    pipeline, store = load_pipeline(str(recipe)), open_store(str(tmp_path / "s"))
    found = planned(pipeline, store)
    assert {name: stage.state for name, stage in found.items()} == {
        "images@root=a": "run",
        "images@root=b": "run",
        "images@root=c": "missing",
        "pixels@root=a": "pending",
        "pixels@root=b": "pending",
        "pixels@root=c": "skipped",
        "report": "pending",
    }
    why = plan.reasons(found.values(), {})
    assert why["images@root=c"] == f"source.root: {tmp_path / 'c'} does not exist"
    assert why["pixels@root=c"] == "images@root=c cannot be made"
    assert found["report"].config == pipeline.stages["report"].model_copy(
        update={
            "of": ("images@root=a", "images@root=b", "pixels@root=a", "pixels@root=b"),
            "missing": ("images@root=c", "pixels@root=c"),
        }
    )


def test_where_no_member_has_its_source_nothing_starts(recipe: Path, tmp_path: Path) -> None:
    pipeline, store = load_pipeline(str(recipe)), open_store(str(tmp_path / "s"))
    with pytest.raises(RecipeError, match=r"c does not exist$"):
        planned(pipeline, store, "pixels@root=c")
    for name in "ab":
        (tmp_path / name).rename(tmp_path / f"not {name}")
    with pytest.raises(RecipeError, match=r"a does not exist\n  \(the sources of all other members of images are"):
        planned(pipeline, store)


def test_what_a_report_can_do_without() -> None:
    stage = {"job": "ingest", "source": {"kind": "digits"}}
    two = {f"a@x={number}": stage for number in (1, 2)}
    tiny = {"patch_size": 4, "width": 16, "depth": 1, "num_heads": 2}
    sizes = {"resolution": 8, "steps": 1, "batch_size": 2, "learning_rate": 1.0}
    train = {"job": "pretrain", "data": "b", "model": tiny} | sizes
    report = {"job": "report", "title": "t", "of": ["b", *two]}
    pipeline = Pipeline.model_validate({"name": "p", "stages": two | {"b": stage, "train": train, "report": report}})
    asked = pipeline.stages["report"]
    assert plan.without(asked, {"train"}) is asked
    left = plan.without(asked, {"a@x=1"})
    assert left is not None
    assert left.inputs() == {"of": ("b", "a@x=2")}
    assert plan.without(asked, {"b"}) is None, "a stage that is no member"
    assert plan.without(asked, {"a@x=1", "a@x=2"}) is None, "the last member"
    assert plan.without(pipeline.stages["train"], {"b"}) is None


def test_a_report_of_less_is_another_report(recipe: Path, tmp_path: Path) -> None:
    """And the same one as long as the same is missing: a second run makes nothing."""
    pipeline, store = load_pipeline(str(recipe)), open_store(str(tmp_path / "s"))

    def make_all() -> dict[str, str]:
        while ready := [stage for stage in planned(pipeline, store).values() if stage.state == "run"]:
            for stage in ready:
                assert stage.key is not None
                manifest = make_manifest(
                    stage.config.job,
                    key=stage.key,
                    content_digest=stage.name,
                    config=stage.config.model_dump(mode="json"),
                    source=stage.source,
                )
                st.commit(store, manifest)
        return {name: stage.key for name, stage in planned(pipeline, store).items() if stage.key}

    first = make_all()
    assert set(first) == {"images@root=a", "images@root=b", "pixels@root=a", "pixels@root=b", "report"}
    assert make_all() == first
    images(tmp_path / "c")
    then = make_all()
    assert len(then) == 7
    assert then["report"] != first["report"]
    assert {name: then[name] for name in first if name != "report"} | {"report": first["report"]} == first


def test_the_vtab_recipe_takes_archives_and_a_model_and_has_all_tasks() -> None:
    with pytest.raises(RecipeError) as raised:
        load_pipeline("vtab_fewshot")
    _, images, backbone = str(raised.value).splitlines()
    assert images.endswith("--set images.source.root=... (in images@task=caltech101 and 18 more)"), "said once"
    assert backbone.endswith("--set backbone.path=...")
    stages = load_pipeline("vtab_fewshot", ("images.source.root=/x", "backbone.path=/y")).stages
    assert [name for name in stages if name.startswith("images")] == [f"images@task={task}" for task in TASKS]
    report = stages["report"].inputs()["of"]
    assert len(report) == 2 * len(TASKS) + 1


def test_the_petl_recipe_has_other_methods_by_settings_and_trials_for_each_task() -> None:
    """100 epochs of 15 batches; the methods of its head."""
    given = ("images.source.root=/x", "backbone.path=/y")
    stages = load_pipeline("vtab_petl", given).stages
    lora, selected = (stages[f"{stage}@task=dtd"] for stage in ("finetune", "selected"))
    assert isinstance(lora, Finetune) and isinstance(selected, Finetune)
    assert lora.lora is not None and warmup_steps(lora.optimizer, lora.steps) == 10 * (1000 // 64) == lora.steps / 10
    assert len(points(lora)) == 1 and len(points(selected)) == 9
    assert selected.at(points(selected)[0]) == lora.at({"learning_rate": 0.0005}).model_copy(
        update={"lora": lora.lora.model_copy(update={"scale": 0.1})}
    ), "otherwise the same"
    for freeze in ("all_but_biases", "backbone", None):
        changed = (*given, "finetune.lora=null", f"finetune.freeze={'null' if freeze is None else freeze}")
        other = load_pipeline("vtab_petl", changed).stages["finetune@task=dtd"]
        assert isinstance(other, Finetune)
        assert other == lora.model_copy(update={"lora": None, "freeze": freeze})
