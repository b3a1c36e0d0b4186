"""A recipe is refused with a message that names the field and what would be right, before anything starts."""

import copy
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.recipe.load import load_pipeline, parse_pipeline, read_yaml, schema, yaml_text
from pipelines.recipe.pipeline import Pipeline
from pipelines.spec import RecipeError
from tests.support.paths import TINY
from tests.support.recipes import changed


@pytest.mark.parametrize("recipe", ["quickstart", str(TINY)])
def test_shipped_recipes_are_right(recipe: str) -> None:
    assert load_pipeline(recipe).stages


def test_order_puts_inputs_first() -> None:
    pipeline = load_pipeline(str(TINY))
    order = pipeline.order()
    for name, stage in pipeline.stages.items():
        for inputs in stage.inputs().values():
            assert all(order.index(given) < order.index(name) for given in inputs)


def test_needed_for_a_stage_is_what_is_before_it() -> None:
    assert set(load_pipeline(str(TINY)).needed_for(("probe",))) == {"digits", "pretrain", "probe"}


def at(checkpoint: Any, stage: str = "pretrain") -> dict[str, Any]:
    return {"stage": stage, "checkpoint": checkpoint}


def over(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "over": values} | ({"trials": 1} if kind == "random" else {})


NO_FIELD = "there is no such field; did you mean"
RESNET = {"family": "resnet", "units": [1]}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("stages.pretrain.stepz", 3, f"stages.pretrain.stepz: {NO_FIELD} 'steps'?"),
        ("stages.pretrain.steps", "many", "stages.pretrain.steps: Input should be a valid integer"),
        ("stages.pretrain.steps", ..., "stages.pretrain.steps: is missing"),
        ("stages.pretrain.model.depht", 3, "did you mean 'depth'?"),
        ("stages.pretrain.model", "R50x9", "pretrain.model: unknown variant 'R50x9'; the nearest is 'R50x"),
        ("stages.pretrain.model", 7, "stages.pretrain.model: expected a mapping, {field: value}, not 7"),
        ("stages.pretrain.model", None, "stages.pretrain: model is missing; only a stage with init_from"),
        ("stages.pretrain.model.family", "cnn", "pretrain.model: family must be one of vit, resnet"),
        ("stages.pretrain.model", {"family": "resnet"}, "stages.pretrain.model.units: is missing"),
        ("stages.pretrain.model", RESNET | {"width_fac": 2}, f"model.width_fac: {NO_FIELD} 'width_factor'?"),
        ("stages.pretrain.model.vit", 3, "stages.pretrain.model.vit: there is no such field"),
        ("stages.pretrain.model.stem", [1, 1], "patch_size 4 is not a multiple of 8, the stride of a stem"),
        ("stages.digits.source.sead", 3, "stages.digits.source.sead: there is no such field"),
        ("stages.pretrain.resolution", 9, "resolution 9 is not a multiple of patch_size 4; 8 or 12 would"),
        ("stages.pretrain.resolution", 10**400, "stages.pretrain.resolution: Input should be less than"),
        ("stages.pretrain.model.num_heads", 3, "width 16 is not a multiple of num_heads 3"),
        ("stages.pretrain.model.width", 10**32, "width: Input should be less than or equal to 1048576"),
        ("stages.pretrain.model", RESNET | {"width_factor": 10**32}, "width_factor: Input should be less"),
        ("stages.pretrain.workers", 5, "batch_size 32 is not a multiple of workers 5"),
        ("stages.pretrain.gradient_accumulation_steps", 5, "32 is not a multiple of gradient_accumulation"),
        ("stages.finetune.gradient_accumulation_steps", 7, "not a multiple of gradient_accumulation_steps 7"),
        ("stages.finetune.workers", 7, "is not a multiple of workers 7 x gradient_accumulation_steps 1"),
        ("stages.finetune.early_stopping", {"evaluations": 10**6}, "evaluations 1000000 is more than steps"),
        ("stages.pretrain.learning_rate", float("inf"), "pretrain.learning_rate: Input should be a finite"),
        ("stages.pretrain.seed", -1, "pretrain.seed: Input should be greater than or equal to 0, not -1"),
        ("stages.finetune.labels.seed", 2**32, "labels.seed: Input should be less than 4294967296, not 42"),
        ("stages.pretrain.objective", "sofmax", "objective: Input should be 'softmax', 'sigmoid', "),
        ("stages.finetune.learning_rates", [-1.0], "stages.finetune.learning_rates"),
        ("stages.finetune.learning_rates", [0.1, 0.1], "[0.1, 0.1] contains duplicates"),
        ("stages.probe.shots", [], "stages.probe: shots: give at least one"),
        ("stages.pretrain.keep_steps", [5, 21], "stages.pretrain: keep_steps 21 is more than steps 20"),
        ("stages.pretrain.checkpoint_every", {}, "checkpoint_every: give steps, minutes or both"),
        ("stages.probe.backbone", at("step:5"), "does not keep (it keeps step:20); give it keep_steps: [5]"),
        ("stages.probe.backbone", at("step:21"), "backbone.checkpoint: step:21, but pretrain has 20 steps"),
        ("stages.probe.backbone", at("best", "finetune"), "finetune has job finetune and one set of weights"),
        (
            "stages.probe.backbone",
            at("step:05"),
            "'step:05' is not a checkpoint; expected last, best or step:N",
        ),
        (
            "stages.probe.backbone",
            at(5),
            "backbone.checkpoint: 5 is not a checkpoint; expected last, best or",
        ),
        ("stages.probe.backbone", {"stage": "pretrain", "chekpoint": "best"}, f"{NO_FIELD} 'checkpoint'?"),
        ("stages.probe.backbone", {"checkpoint": "best"}, "stages.probe.backbone.stage: is missing"),
        ("stages.probe.backbone", 7, "stages.probe.backbone: Input should be a valid string, not 7"),
        (
            "stages.probe.backbone",
            at("best", "pretran"),
            "no stage is called 'pretran'; did you mean 'pretrain'?",
        ),
        ("stages.pretrain.data", "digit", "no stage is called 'digit'; did you mean 'digits'?"),
        ("stages.pretrain.data", "probe", "data: probe is an evaluation, but this takes a dataset"),
        (
            "stages.probe.backbone",
            "digits",
            "digits is a dataset, but this takes a model (pretrain, finetune)",
        ),
        ("stages.finetune.model", "Ti/8", "give either backbone"),
        ("stages.finetune.labels.folds", 9, "folds 9 is more than per_class 4"),
        ("stages.probe.job", "evalute", "stages.probe.job: unknown job 'evalute'; did you mean 'evaluate'?"),
        ("stages.probe.job", "x", "stages.probe.job: unknown job 'x'; there are: ingest, import, pretrain,"),
        ("stages.probe.job", ..., "stages.probe.job: is missing; write it there, or --set probe.job="),
        ("stages.digits.source.kind", "foldr", "source.kind: unknown kind 'foldr'; did you mean 'folder'?"),
        ("stages.digits.source.kind", ["x"], "stages.digits.source.kind: unknown kind ['x']; there are: gl"),
        (
            "stages.finetune.search",
            {"kind": "gird"},
            "search.kind: unknown kind 'gird'; did you mean 'grid'?",
        ),
        ("stages.finetune.learning_rates", 0.001, "learning_rates: expected a list, [0.001], not 0.001"),
        ("stages.finetune.learning_rates", {}, "learning_rates: expected a list, not {}"),
        (
            "stages.finetune.search",
            over("grid", {"optimizer.betas": [0.9]}),
            "betas: value 0.9: optimizer.betas ex",
        ),
        ("stages.finetune.optimizer", "sgd", "optimizer: expected a mapping, {field: value}, not 'sgd'"),
        ("stages.probe", 3, "stages.probe: expected a mapping, {field: value}, not 3"),
        ("stages.pretrain.fewshot", {"shots": []}, "fewshot.shots: expected at least 1 item, not []"),
        ("stages.pretrain.fewshot", {"shot": [1]}, f"shot: {NO_FIELD} 'shots'?"),
        (
            "stages.finetune.search",
            over("random", {"mixup": {"low": 0, "hi": 1}}),
            f"mixup.hi: {NO_FIELD} 'high'?",
        ),
        ("stages.pretrain.optimizer", {"betas": [0.9]}, "stages.pretrain.optimizer.betas.1: is missing"),
        ("stages.pretrain.lr", 1, f"pretrain.lr: {NO_FIELD} 'learning_rate'?"),
        ("stages.finetune.lr", 1, f"finetune.lr: {NO_FIELD} 'learning_rates'?"),
        ("stages.finetune.optimizer", {"lr": 1}, f"lr: {NO_FIELD} 'finetune.learning_ra"),
        ("stages.finetune.epochs", 1, f"epochs: {NO_FIELD} 'steps'?"),
        ("stages.probe.train", "digits", f"train: {NO_FIELD} 'data'?"),
        ("stages.pretrain.evaluate", {}, "there is no such field; it is a job: write another stage"),
        ("train", {"job": "pretrain"}, f"train: {NO_FIELD} 'stages.train'?"),
        ("stages", {}, "stages"),
        ("name", "Has Spaces", "name"),
    ],
)
def test_bad_field_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_pipeline(changed(path, value), "tiny.yaml")
    assert str(error.value).startswith("tiny.yaml:")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("evaluate", "no stage is called 'evaluate'; with job evaluate there are: few_shot"),
        (
            "train",
            "no stage is called 'train'; with job pretrain or finetune there are: pretrain, finetune_100,",
        ),
        ("fewshot", "no stage is called 'fewshot'; did you mean 'few_shot'?"),
    ],
)
def test_a_stage_is_found_by_its_job(stage: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_pipeline("quickstart", (f"{stage}.threads=1",))
    with pytest.raises(RecipeError, match=message):
        load_pipeline("quickstart").needed_for((stage,))


def test_an_empty_list_of_names_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("name: x\nstages: {}\n")
    with pytest.raises(RecipeError, match=r"no stage is called 'a'; there are: none$"):
        load_pipeline(str(tmp_path / "x.yaml"), ("a.steps=1",))


def test_every_seed_fits_all_random_numbers() -> None:
    """Seeds from 2**32 on failed in numpy, in the stage, which was then tried again."""
    seeds = [
        fields["properties"]["seed"]
        for fields in schema()["$defs"].values()
        if "seed" in fields.get("properties", {})
    ]
    assert len(seeds) > 10
    assert {(seed["minimum"], seed["exclusiveMaximum"]) for seed in seeds} == {(0, 2**32)}


def numbers(value: Any, path: str = "stages") -> Iterator[str]:
    """Yield the path of each number in a recipe."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, f"{path}.{name}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def test_a_boolean_is_not_a_number() -> None:
    """`freeze: no` froze the embeddings, because pydantic takes false for 0."""
    written = load_pipeline("quickstart").model_dump(mode="json")
    paths = list(numbers(written["stages"]))
    assert len(paths) > 100
    for path in paths:
        raw = copy.deepcopy(written)
        *parents, last = path.split(".")[1:]
        at = raw["stages"]
        for parent in parents:
            at = at[parent]
        at[last] = True
        with pytest.raises(RecipeError, match=rf"\n  {re.escape(path)}: expected a number, not true"):
            parse_pipeline(raw, "quickstart")


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("finetune.freeze=no", ""),
        ("pretrain.model.layer_scale=yes", ""),
        ("pretrain.zero_stage=on", ""),
        ("finetune.class_weights={a: yes}", "finetune.class_weights.a: "),
        ("probe.shots=[yes, 5]", "probe.shots.0: "),
        ("pretrain.optimizer={betas: [0.9, off]}", "pretrain.optimizer.betas.1: "),
        ("pretrain.matrix.mixup=[yes, 0.5]", "pretrain.mixup: "),
        ("finetune.search.over.mixup.low=no", ""),
        ("finetune.search.trials=yes", ""),
        ("finetune.search.over.label_smoothing=[0.5, yes]", "value True: "),
    ],
)
def test_a_boolean_for_a_number_is_named_with_its_field(override: str, field: str) -> None:
    search = "finetune.search={kind: random, trials: 3, over: {mixup: {low: 0.0, high: 1.0}}}"
    settings = (search, override) if ".search." in override else (override,)
    with pytest.raises(
        RecipeError, match=rf"^--set {re.escape(override)}: {field}.*expected a number, not (true|false)"
    ):
        load_pipeline(str(TINY), settings)


@pytest.mark.parametrize(
    "model",
    [
        "Ti/8",
        "R50x1",
        "R+Ti/16",
        {"family": "resnet", "units": [1, 1]},
        {"patch_size": 4, "width": 8, "depth": 1, "num_heads": 1, "axial": True, "pooling": "gap"},
    ],
    ids=str,
)
def test_a_model_is_a_name_or_a_shape_of_either_family(model: Any) -> None:
    raw = changed("stages.pretrain.model", model)
    raw["stages"]["pretrain"]["resolution"] = 32
    pipeline = parse_pipeline(raw, "tiny.yaml")
    written = pipeline.model_dump(mode="json")
    assert Pipeline.model_validate(written) == pipeline
    validator = jsonschema.Draft202012Validator(schema())
    assert not list(validator.iter_errors(raw))
    raw["stages"]["pretrain"]["model"] = "R50x9"
    assert list(validator.iter_errors(raw))


MASKED, MAE, DISTILLED = ({"objective": name} for name in ("masked_patches", "mae", "distillation"))
MOCO = {"objective": "contrastive", "augment": "crop_flip"}
BESIDE = {"auxiliary": {"masked_patches": 1}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": "sigmoid", "label_smoothing": 0.5}, "label_smoothing 0.5: with objective sigmoid"),
        (MASKED | {"label_smoothing": 0.1}, "which objective masked_patches does not use"),
        (MASKED | {"mixup": 0.2}, "which objective masked_patches does not use"),
        (MASKED | {"model": {"head_bias": -10}}, "need labels and a classifier, which objective"),
        ({"patch_target": "pixels"}, "patch_target pixels is for objective masked_patches"),
        ({"contrastive": {"temperature": 0.1}}, "that only objective contrastive uses"),
        (MAE | BESIDE, "auxiliary is beside labels, which objective"),
        (BESIDE | {"resnet": "R50x1"}, "auxiliary needs a ViT"),
        (BESIDE | {"resolution": 4}, "resolution 4 is a single patch; auxiliary"),
        ({"auxiliary": {"masked_patches": 0}}, "should be greater than 0"),
        ({"mae": {"normalise": False}}, "mae has settings that only objective mae uses; remove it"),
        (MAE | {"mixup": 0.2}, "which objective mae does not use"),
        (DISTILLED, "teacher is missing; objective distillation needs a model to imitate"),
        ({"distillation": {"kind": "soft"}}, "distillation has settings that only objective distillation"),
        (DISTILLED | {"distillation": {"temperature": 3}}, "temperature 3.0 is for kind soft"),
        (DISTILLED | {"distillation": {"kind": "features", "weight": 1}}, "weight 1 leaves no labels"),
        (DISTILLED | {"distillation": {"weight": 0}}, "should be greater than 0"),
        (MAE | {"model": {"pooling": "map"}}, "autoencoder has no head: num_classes is 0"),
        (MAE | {"mae": {"mask_fraction": 0.8}}, "mask_fraction 0.8 of 4 leaves 0 visible"),
        (MAE | {"mae": {"mask_fraction": 1}}, "should be less than 1"),
        (MAE | {"mae": {"decoder_heads": 5}}, "decoder_width 512 is not a multiple of decoder"),
        (MAE | {"model": {"position": "relative"}}, "position is 'relative'"),
        (MAE | {"resnet": "R50x1"}, "it uses patches; model is a resnet"),
        ({"objective": "contrastive"}, "augment none: the views of objective contrastive would show"),
        (MOCO | {"cutmix": 1}, "which objective contrastive does not use"),
        (MOCO | {"randaugment": {"magnitude": 10}}, "randaugment cannot be combined with objective contra"),
        (MOCO | {"zero_stage": 3}, "use 1 or 2"),
        (MOCO | {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps 2: objective contrastive"),
        (
            {"workers": 2, "gradient_accumulation_steps": 32},
            "batch_size 32, which is 16 for each of 2 workers",
        ),
        ({"resnet": "R50x1", "activation_checkpointing": True}, "the blocks of a ViT; model is a resnet"),
        (MOCO | {"resnet": "R50x1"}, "model is a resnet"),
        (MASKED | {"model": {"pooling": "map"}}, "does not train model.pooling map"),
        (MASKED | {"resolution": 4}, "resolution 4 is a single patch"),
        (MASKED | {"resnet": "R50x1"}, "it uses patches; model is a resnet"),
    ],
    ids=str,
)
def test_a_pretraining_says_what_does_not_go_together(fields: dict[str, Any], message: str) -> None:
    raw, fields = yaml.safe_load(TINY.read_text()), dict(fields)
    model = raw["stages"]["pretrain"]["model"] | fields.pop("model", {})
    raw["stages"]["pretrain"] |= {"model": fields.pop("resnet", model), **fields}
    with pytest.raises(RecipeError) as error:
        parse_pipeline(raw, "tiny.yaml")
    assert message in str(error.value)


def test_cycle_is_shown() -> None:
    raw = changed("stages.pretrain.data", "digits")
    raw["stages"]["a"] = raw["stages"]["finetune"] | {"backbone": "b"}
    raw["stages"]["b"] = raw["stages"]["finetune"] | {"backbone": "a"}
    with pytest.raises(RecipeError, match=r"cycle, (a -> b -> a|b -> a -> b)"):
        parse_pipeline(raw, "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", "line 2: duplicate key 'name'"),
        ("name: &x a\nstages: *x\n", "aliases are not supported"),
        ("- a\n", "expected a mapping"),
        ("name: [\n", "expected"),
        ("name: 2024-99-99\n", "month"),
        ("? [a]\n: b\n", "unhashable"),
        ("[" * 5000, "recursion"),
        ("name: !!python/object/apply:os.system [true]\n", "could not determine a constructor"),
    ],
)
def test_hostile_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_pipeline(str(file))
    assert message in str(error.value)


def test_missing_file_and_unknown_name() -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: no such file"):
        load_pipeline("nowhere.yaml")
    with pytest.raises(RecipeError, match="did you mean 'quickstart'"):
        load_pipeline("quikstart")


def test_override_replaces_one_field_before_checking() -> None:
    before = load_pipeline(str(TINY))
    after = load_pipeline(str(TINY), ("pretrain.steps=7", "pretrain.optimizer.weight_decay=0.3"))
    expected = before.model_dump()
    expected["stages"]["pretrain"]["steps"] = 7
    expected["stages"]["pretrain"]["optimizer"]["weight_decay"] = 0.3
    assert after == Pipeline.model_validate(expected)


@pytest.mark.parametrize(
    "override",
    ["pretrain", "pretrain=3", "pretran.steps=3", "pretrain.stepz=3", "pretrain.steps.x=3", "a.b=3"],
)
def test_bad_override_is_refused(override: str) -> None:
    with pytest.raises(RecipeError):
        load_pipeline(str(TINY), (override,))


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e3", 1000), ("1000.0", 1000), ("0x10", 16), ("0o17", 15), ("+5", 5), ("12e0", 12), ("9.", 9)],
)
def test_numbers_are_those_of_yaml_1_2(text: str, number: int, tmp_path: Path) -> None:
    assert load_pipeline(str(TINY), (f"pretrain.steps={text}",)).stages["pretrain"].steps == number
    (tmp_path / "x.yaml").write_text(TINY.read_text().replace("steps: 20", f"steps: {text}"))
    assert load_pipeline(str(tmp_path / "x.yaml")).stages["pretrain"].steps == number


@pytest.mark.parametrize(
    "text", ["010", "08", "-010", "1:30", "12:30:00", "1_000", "1_000.5", "1_0e3", "0b1", "-0x1F"]
)
def test_a_number_that_readers_of_yaml_read_differently_is_refused(text: str, tmp_path: Path) -> None:
    for quoted in (text, f"[{text}]", f"{{seed: {text}}}"):
        with pytest.raises(
            RecipeError, match=rf"^--set pretrain.steps=.*: {text} is ambiguous in YAML; write "
        ):
            load_pipeline(str(TINY), (f"pretrain.steps={quoted}",))
    (tmp_path / "x.yaml").write_text(TINY.read_text().replace("steps: 20", f"steps: {text}"))
    with pytest.raises(RecipeError, match=rf"x\.yaml: line 15: {text} is ambiguous"):
        load_pipeline(str(tmp_path / "x.yaml"))


def test_a_number_has_one_spelling_in_a_key() -> None:
    def searched(*values: str) -> Any:
        over = f"{{kind: grid, over: {{learning_rate: [{', '.join(values)}]}}}}"
        settings = ("finetune.learning_rates=[]", f"finetune.search={over}")
        return load_pipeline(str(TINY), settings).stages["finetune"].search

    assert searched("1e-3", "1e-2").model_dump_json() == searched("1.0e-3", "0.01").model_dump_json()
    with pytest.raises(RecipeError, match=r"duplicate value 0\.001"):
        searched("1e-3", "0.001")
    decay = load_pipeline(str(TINY), ("pretrain.optimizer.weight_decay=-0.0",)).stages["pretrain"].optimizer
    assert str(decay.weight_decay) == "0.0"


@given(st.text(min_size=1) | st.from_regex(r"[-+0-9._:ex]{1,8}", fullmatch=True))
@example("photos: 2024")
@example("x: {y")
@example("2024")
@example("1e3")
@example("010")
@example("\x85")
@example("a\nb")
def test_text_is_written_as_the_reader_reads_it(text: str) -> None:
    assert "\n" not in yaml_text(text)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(f"a: {yaml_text(text)}\nb: {{c: {yaml_text(text)}, d: 1}}\n")
        file.flush()
        assert read_yaml(Path(file.name)) == {"a": text, "b": {"c": text, "d": 1}}


def test_the_last_checkpoint_is_spelled_as_the_stage_alone() -> None:
    plain = load_pipeline(str(TINY)).stages["probe"]
    assert load_pipeline(str(TINY), ("probe.backbone.checkpoint=last",)).stages["probe"] == plain
    assert plain.model_dump()["backbone"] == "pretrain"
    best = load_pipeline(str(TINY), ("probe.backbone.checkpoint=best",)).stages["probe"]
    assert best.inputs() == plain.inputs() and best.checkpoints() == {"backbone": "best"}
    assert type(best).model_validate(best.model_dump(mode="json")) == best, "as an attempt records it"
    assert not plain.checkpoints()


def test_best_needs_an_objective_that_measures_accuracy() -> None:
    settings = ("pretrain.objective=masked_patches", "probe.backbone.checkpoint=best")
    with pytest.raises(
        RecipeError, match="best is chosen by dev accuracy, which pretrain with objective masked"
    ):
        load_pipeline(str(TINY), settings)
