"""What a report prints of a stage's settings changes with everything that changes the stage's key."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from pipelines.identity import identity_fields
from pipelines.spec import STAGE_TYPES, Evaluate, Finetune, Import, Pretrain
from pipelines.spec.published import published
from pipelines.store import InputRef
from ray_jobs.reporting import provenance
from ray_jobs.reporting.page import metric, quoted, setting
from tests.support.records import make_manifest
from vit_model.fields import Frozen, marks

OTHER: dict[type, Any] = {int: lambda v: v + 1, float: lambda v: v + 1e-7, bool: lambda v: not v}
TRAINED = {"model": "S/16", "resolution": 32, "steps": 3, "batch_size": 4, "learning_rate": 0.1}


def constructed(model: type[Frozen]) -> Frozen:
    """Return an instance with the defaults, and 1 for what has none."""
    return model.model_construct(**{n: 1 for n, info in model.model_fields.items() if info.is_required()})


def groups(annotation: Any) -> Iterator[type[Frozen]]:
    """Yield the groups of fields that a field of this type can hold."""
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        yield annotation
    for part in get_args(annotation):
        yield from groups(part)


def own_fields(model: type[Frozen]) -> list[str]:
    """Return the fields that are in the key by their values."""
    return [
        name
        for name, info in model.model_fields.items()
        if not (name == "job" or marks(info).get("execution") or "input" in marks(info))
    ]


def variants(config: Frozen) -> Iterator[tuple[Frozen, Frozen]]:
    """Yield pairs of configurations that differ in one identity field, at any depth."""
    for name in own_fields(type(config)):
        info, value = type(config).model_fields[name], getattr(config, name)
        yield config, config.model_copy(update={name: OTHER.get(type(value), lambda v: f"{v} x")(value)})
        for group in groups(info.annotation):
            whole = constructed(group)
            yield config, config.model_copy(update={name: whole})
            for pair in variants(whole):
                before, after = (config.model_copy(update={name: inner}) for inner in pair)
                yield before, after


def printed(config: Any) -> list[tuple[str, str]]:
    return [(each["field"], setting(each["value"])) for each in provenance.changed_fields(config)]


@pytest.mark.parametrize("job", sorted(STAGE_TYPES.keys() - {"report"}))
def test_each_identity_field_changes_what_is_printed(job: str) -> None:
    changed = [
        (before, after)
        for before, after in variants(constructed(STAGE_TYPES[job]))
        if identity_fields(before) != identity_fields(after)
    ]
    assert len(changed) >= len(own_fields(STAGE_TYPES[job]))
    for before, after in changed:
        assert printed(before) != printed(after), (before, after)


def test_settings_are_the_fields_that_differ_from_their_defaults() -> None:
    config = {
        "job": "pretrain",
        "data": "d",
        **TRAINED,
        "optimizer": {"weight_decay": 0.1},
        "dtype": "float32",
    }
    stage = Pretrain.model_validate(config | {"workers": 2, "fewshot": {}, "init_from": "start"})
    found = {each["field"]: each["value"] for each in provenance.settings(stage.model_dump(mode="json"))}
    assert {name: found.pop(name) for name in list(found) if name.startswith("model.")}["model.width"] == 384
    trained = {name: value for name, value in TRAINED.items() if name != "model"}
    assert found == {**trained, "optimizer.weight_decay": 0.1, "dtype": "float32"}
    search = {
        "kind": "random",
        "trials": 3,
        "over": {"learning_rate": {"low": 0.1, "high": 1.0}, "mixup": [0.0, 0.2]},
    }
    tuned = Finetune.model_validate(
        {"job": "finetune", "data": "d", "backbone": "b", "steps": 30, "batch_size": 4, "search": search}
        | {"early_stopping": {}}
    )
    lines = printed(tuned)
    assert ("search.trials", "3") in lines and ("early_stopping", provenance.DEFAULTS) in lines
    assert ("search.over", "learning rate (low 0.1, high 1.0, scale linear), mixup (0.0, 0.2)") in lines


def test_a_configuration_of_another_version_is_shown_as_it_was_recorded() -> None:
    config = {"job": "evaluate", "data": "d", "backbone": "b", "an_old_field": 3}
    assert {each["field"] for each in provenance.settings(config)} == {"data", "backbone", "an_old_field"}


@pytest.mark.parametrize(
    ("backbone", "shown"),
    [
        ("pretrain", "pretrain"),
        ({"stage": "pretrain", "checkpoint": "step:5000"}, "pretrain at step 5,000"),
        ({"stage": "pretrain", "checkpoint": "best"}, "pretrain at its best step on dev"),
    ],
)
def test_settings_name_the_inputs_and_their_checkpoints(backbone: Any, shown: str, tmp_path: Path) -> None:
    taken = [InputRef(job="pretrain", key="p", content_digest="d", manifest_sha256="m")]
    config = Evaluate(job="evaluate", data="digits", backbone=backbone).model_dump(mode="json")
    manifest = make_manifest("evaluate", config=config, inputs={"data": taken, "backbone": taken})
    parts = [("pretrain", make_manifest("ingest", key="p"), tmp_path), ("probe", manifest, tmp_path)]
    inputs = {each["field"]: each["value"] for each in provenance.stages(parts)[1]["settings"]}
    assert inputs == {"data": "pretrain", "backbone": shown}


PETS = published()["augreg_b32_pets"]
TUNED, INGEST, BACKBONE = PETS.stages()
REPEATED = {"tuned": TUNED, "ingest": INGEST, "backbone": BACKBONE}
OPEN = {f"tuned.{name}" for name in ("seed", "refits", "dtype", "seen_in_training")}


def changed(config: Frozen, prefix: str) -> Iterator[tuple[str, Frozen]]:
    """Yield the path of each identity field, at any depth, and the configuration with another value there."""
    for name in own_fields(type(config)):
        value = getattr(config, name)
        if isinstance(value, Frozen):
            for path, inner in changed(value, f"{prefix}.{name}"):
                yield path, config.model_copy(update={name: inner})
        else:
            other = OTHER.get(type(value), lambda v: f"{v} x")(value)
            yield f"{prefix}.{name}", config.model_copy(update={name: other})


CHANGED = {path: {stage: other} for stage, config in REPEATED.items() for path, other in changed(config, stage)} | {
    "ingest.source.kind": {"ingest": published()["augreg_b32_imagenet"].stages()[1]},
    "ingest.against": {"ingest": INGEST.model_copy(update={"against": ("flowers",)})},
    "ingest.exclude": {"ingest": INGEST.model_copy(update={"exclude": "wrong.csv"})},
    "backbone.path": {"backbone": Import(job="import", path="a/B_32.npz")},
}


@pytest.mark.parametrize("path", CHANGED)
def test_a_protocol_is_a_published_one_only_if_every_field_agrees(path: str) -> None:
    found = provenance.same_protocol(**REPEATED | CHANGED[path])  # type: ignore[arg-type]
    assert found == (PETS if path in OPEN else None)


def test_small_trainings_and_class_names_of_digits_are_readable() -> None:
    assert metric(3.913e-05, "exaflops") == "teraflops 39.13" and metric(2.5, "exaflops") == "exaflops 2.5"
    assert metric(0.6136, "final_loss") == "final loss 0.6136"
    assert (quoted("2"), quoted("cat 2")) == ("‘2’", "cat 2")
