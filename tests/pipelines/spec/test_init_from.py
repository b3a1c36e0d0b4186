"""`init_from` in a recipe: what it may name, what must agree, and that it enters the key by content alone."""

from typing import Any

import pytest

from pipelines.identity import identity_fields, stage_key
from pipelines.recipe.load import parse_pipeline
from pipelines.recipe.matrix import expand
from pipelines.recipe.pipeline import Pipeline
from pipelines.spec import LATEST, ModelSize, Pretrain, RecipeError, ResNetSize
from vit_model.sizes import size_of

SIZE: dict[str, Any] = {"patch_size": 4, "width": 16, "depth": 1, "num_heads": 2}
TRAIN = {"job": "pretrain", "data": "digits", "steps": 20, "batch_size": 32, "learning_rate": 1e-3}


def raw(**fields: Any) -> dict[str, Any]:
    """A recipe whose stage `more` starts from the stage `first`, but for these fields of it."""
    tuned = {"job": "finetune", "data": "digits", "learning_rates": [1e-3], "steps": 1, "batch_size": 4}
    more = {**TRAIN, "init_from": "first", "resolution": 16, "model": SIZE, **fields}
    return {
        "name": "twice",
        "stages": {
            "digits": {"job": "ingest", "source": {"kind": "digits"}},
            "vit": {"job": "import", "path": "/weights.npz"},
            "first": {**TRAIN, "resolution": 8, "model": SIZE, "keep_steps": [5]},
            "tuned": tuned | {"backbone": "first"},
            "tuned_vit": tuned | {"backbone": "vit"},
            "more": {name: value for name, value in more.items() if value is not ...},
        },
    }


def parsed(**fields: Any) -> Pipeline:
    return parse_pipeline(raw(**fields), "x.yaml")


def stage(**fields: Any) -> Pretrain:
    found = parsed(**fields).stages["more"]
    assert isinstance(found, Pretrain)
    return found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_from": "digits"}, "stages.more.init_from: digits is a dataset; expected a model (vit, first,"),
        ({"init_from": "frist"}, "stages.more.init_from: no stage is called 'frist'; did you mean 'first'?"),
        ({"init_from": "more"}, "a stage cannot start from its own result; latest is the newest model that it has"),
        ({"init_from": {"stage": "first", "checkpoint": "step:6"}}, "step:6, which first does not keep"),
        ({"init_from": {"stage": "vit", "checkpoint": "best"}}, "best is for a pretrain stage; vit has job import"),
        ({"init_from": {"stage": LATEST, "checkpoint": "best"}}, "write init_from: latest"),
        ({"init_from": {"stage": "first", "chekpoint": "best"}}, "stages.more.init_from.chekpoint: there is no such"),
        ({"init_from": None, "model": ...}, "model is missing; only a stage with init_from: NAME can do without"),
        ({"init_from": LATEST, "model": ...}, "model is missing; with init_from: latest the first run needs it"),
        ({"init_from": "@live", "model": ...}, "model is missing; with init_from: @live the first run needs it"),
        ({"init_from": "@Live"}, "'@Live' is not a valid alias; expected @NAME, such as @production"),
        ({"init_from": {"stage": "@live", "checkpoint": "best"}}, "an alias names a model with its last weights"),
        ({"data": "@live"}, "no stage is called '@live'"),
        (
            {"model": SIZE | {"width": 32}},
            "stages.more.init_from: first does not match model: width is 16 in the backbone, 32 in the model",
        ),
        (
            {"init_from": "tuned", "model": SIZE | {"depth": 2}},
            "tuned does not match model: depth is 1 in the backbone, 2 in the model",
        ),
        ({"model": {"family": "resnet", "units": [1]}}, "family is 'vit' in the backbone, 'resnet' in the model"),
        (
            {"model": ..., "resolution": 18},
            "stages.more.init_from: first: resolution 18 is not a multiple of patch_size 4; 16 or 20 would fit",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_work_is_said_before_anything_starts(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        parsed(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": SIZE | {"stochastic_depth": 0.1, "dropout": 0.1, "representation_head": True, "head_bias": -10.0}},
        {"model": SIZE | {"position_resize": "bicubic"}, "objective": "masked_patches"},
        {"model": ...},
        {"model": ..., "init_from": "tuned"},
        {"model": ..., "init_from": "vit", "resolution": 18},
        {"model": SIZE | {"width": 8}, "init_from": "tuned_vit"},
        {"init_from": {"stage": "first", "checkpoint": "step:5"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_may_differ_and_what_only_the_store_knows_is_accepted(fields: dict[str, Any]) -> None:
    pipeline = parsed(**fields)
    assert Pipeline.model_validate(pipeline.model_dump(mode="json")) == pipeline
    assert pipeline.order().index("more") > pipeline.order().index("digits")


def test_latest_is_no_stage() -> None:
    assert stage(init_from=LATEST).inputs() == {"data": ("digits",)}
    recipe = raw(init_from=LATEST)
    recipe["stages"][LATEST] = recipe["stages"]["first"]
    with pytest.raises(RecipeError, match=r"stages\.more\.init_from: latest means .* rename that stage"):
        parse_pipeline(recipe, "x.yaml")


def test_only_the_content_of_the_start_is_in_the_key() -> None:
    """So null, and latest before there is a model, have the key from before the field was there."""
    fields = [identity_fields(stage(init_from=init)) for init in (None, LATEST, "first", "tuned")]
    assert all(one == fields[0] and "init_from" not in one for one in fields)
    inputs = {"data": ["a"]}
    none, latest = (stage_key(stage(init_from=init), inputs, None) for init in (None, LATEST))
    assert none == latest
    found = {"init_from": ["b"]}
    assert len({none, stage_key(stage(), inputs | found, None)}) == 2
    assert stage_key(stage(), inputs | found, None) == stage_key(stage(init_from=LATEST), inputs | found, None)
    step = stage(init_from={"stage": "first", "checkpoint": "step:5"})
    assert stage_key(step, inputs | found, None) != stage_key(stage(), inputs | found, None)


def test_it_follows_a_matrix_and_can_be_an_axis_of_one() -> None:
    recipe = raw()
    recipe["stages"]["first"]["matrix"] = {"seed": [0, 1]}
    stages = expand(recipe)["stages"]
    assert stages["more@seed=1"]["init_from"] == "first@seed=1"
    recipe = raw(matrix={"init_from.checkpoint": ["step:5", "last"]})
    assert expand(recipe)["stages"]["more@checkpoint=last"]["init_from"] == {
        "stage": "first",
        "checkpoint": "last",
    }
    recipe = raw(matrix={"init_from": [None, "first", LATEST]})
    assert parse_pipeline(expand(recipe), "x").stages["more@init_from=latest"].inputs() == {"data": ("digits",)}


@pytest.mark.parametrize(
    "size",
    [
        ModelSize.model_validate("B/16"),
        ModelSize.model_validate("R50+B/16"),
        ModelSize(**SIZE, mlp_ratio=10 / 3, registers=2, layer_scale=1e-5, stochastic_depth=0.2, gelu="exact"),
        ModelSize(**SIZE, representation_head=True, head_bias=-10.0),
        ResNetSize(units=(1, 2), width_factor=2, head_bias=-3.0),
    ],
    ids=lambda size: size.family,
)
def test_a_shape_is_found_again_in_its_architecture(size: Any) -> None:
    built = size.architecture(32, 1, 7)
    assert size_of(built, head=True).architecture(32, 1, 7) == built
    bare = size_of(built, head=False)
    plain = size.model_copy(update={"representation_head": False} if size.family == "vit" else {})
    assert bare.architecture(32, 1, 7) == plain.model_copy(update={"head_bias": 0.0}).architecture(32, 1, 7)
