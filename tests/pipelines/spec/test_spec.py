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


def test_order_puts_inputs_first() -> None:
    pipeline = load_pipeline(str(TINY))
    order = pipeline.order()
    for name, stage in pipeline.stages.items():
        for inputs in stage.inputs().values():
            assert all(order.index(given) < order.index(name) for given in inputs)


def at(checkpoint: Any, stage: str = "pretrain") -> dict[str, Any]:
    return {"stage": stage, "checkpoint": checkpoint}


def over(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "over": values} | ({"trials": 1} if kind == "random" else {})


def changed(path: str, value: Any) -> dict[str, Any]:
    """The tiny recipe with one value replaced, or removed where `value` is ...."""
    raw = yaml.safe_load(TINY.read_text())
    *parents, last = path.split(".")
    at = raw
    for parent in parents:
        at = at[parent]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return raw


NO_FIELD = "there is no such field; did you mean"
RESNET = {"family": "resnet", "units": [1]}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("stages.pretrain.stepz", 3, f"stages.pretrain.stepz: {NO_FIELD} 'steps'?"),
        ("stages.pretrain.steps", "many", "stages.pretrain.steps: Input should be a valid integer"),
        ("stages.pretrain.steps", ..., "stages.pretrain.steps: is missing"),
        ("stages.pretrain.model", "R50x9", "pretrain.model: unknown variant 'R50x9'; the nearest is 'R50x"),
        ("stages.pretrain.model", 7, "stages.pretrain.model: expected a mapping, {field: value}, not 7"),
        ("stages.pretrain.model", None, "stages.pretrain: model is missing; only a stage with init_from"),
        ("stages.pretrain.model.family", "cnn", "pretrain.model: family must be one of vit, resnet"),
        ("stages.pretrain.model", RESNET | {"width_fac": 2}, f"model.width_fac: {NO_FIELD} 'width_factor'?"),
        ("stages.pretrain.model.vit", 3, "stages.pretrain.model.vit: there is no such field"),
        ("stages.pretrain.model.stem", [1, 1], "patch_size 4 is not a multiple of 8, the stride of a stem"),
        ("stages.pretrain.resolution", 9, "resolution 9 is not a multiple of patch_size 4; 8 or 12 would"),
        ("stages.pretrain.resolution", 10**400, "stages.pretrain.resolution: Input should be less than"),
        ("stages.pretrain.model.width", 10**32, "width: Input should be less than or equal to 1048576"),
        ("stages.pretrain.gradient_accumulation_steps", 5, "32 is not a multiple of gradient_accumulation"),
        ("stages.finetune.workers", 7, "is not a multiple of workers 7 x gradient_accumulation_steps 1"),
        ("stages.finetune.early_stopping", {"evaluations": 10**6}, "evaluations 1000000 is more than steps"),
        ("stages.pretrain.learning_rate", float("inf"), "pretrain.learning_rate: Input should be a finite"),
        ("stages.pretrain.seed", -1, "pretrain.seed: Input should be greater than or equal to 0, not -1"),
        ("stages.pretrain.objective", "sofmax", "objective: unknown value 'sofmax'; did you mean 'softmax'?"),
        ("stages.finetune.learning_rates", [0.1, 0.1], "[0.1, 0.1] contains duplicates"),
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
        ("stages.probe.backbone", {"checkpoint": "best"}, "stages.probe.backbone.stage: is missing"),
        ("stages.probe.backbone", 7, "stages.probe.backbone: Input should be a valid string, not 7"),
        ("stages.pretrain.data", "digit", "no stage is called 'digit'; did you mean 'digits'?"),
        ("stages.probe.backbone", "digits", "digits is a dataset; expected a model (pretrain, finetune)"),
        ("stages.finetune.model", "Ti/8", "give either backbone"),
        ("stages.finetune.labels.folds", 9, "folds 9 is more than per_class 4"),
        ("stages.probe.job", "evalute", "stages.probe.job: unknown job 'evalute'; did you mean 'evaluate'?"),
        ("stages.probe.job", "x", "stages.probe.job: unknown job 'x'; there are: ingest, import, pretrain,"),
        ("stages.probe.job", ..., "stages.probe.job: is missing; write it there, or --set probe.job="),
        ("stages.digits.source.kind", ["x"], "stages.digits.source.kind: unknown kind ['x']; there are: gl"),
        (
            "stages.finetune.search",
            {"kind": "gird"},
            "search.kind: unknown kind 'gird'; did you mean 'grid'?",
        ),
        (
            "stages.finetune.learning_rates",
            0.001,
            "learning_rates: expected a list, such as [0.001], not 0.001",
        ),
        ("stages.finetune.learning_rates", {}, "learning_rates: expected a list, not {}"),
        (
            "stages.finetune.search",
            over("grid", {"optimizer.betas": [0.9]}),
            "betas: value 0.9: optimizer.betas ex",
        ),
        ("stages.probe", 3, "stages.probe: expected a mapping, {field: value}, not 3"),
        ("stages.pretrain.fewshot", {"shots": []}, "fewshot.shots: expected at least 1 item, not []"),
        (
            "stages.finetune.search",
            over("random", {"mixup": {"low": 0, "hi": 1}}),
            f"mixup.hi: {NO_FIELD} 'high'?",
        ),
        ("stages.pretrain.optimizer", {"betas": [0.9]}, "stages.pretrain.optimizer.betas.1: is missing"),
        ("stages.pretrain.lr", 1, f"pretrain.lr: {NO_FIELD} 'learning_rate'?"),
        ("stages.finetune.lr", 1, f"finetune.lr: {NO_FIELD} 'learning_rates'?"),
        ("stages.finetune.optimizer", {"lr": 1}, f"lr: {NO_FIELD} 'finetune.learning_ra"),
        ("stages.finetune.Epochs", 1, f"{NO_FIELD} 'steps'? (epochs x training images / batch_size)"),
        ("stages.finetune.wd", 1, f"wd: {NO_FIELD} 'optimizer.weight_decay'?"),
        ("stages.finetune.foo", 1, "foo: there is no such field; the nearest of 38 names: job, resolution, "),
        ("stages.digits.source", {"kind": "foldr"}, "kind: unknown kind 'foldr'; did you mean 'folder'?"),
        (
            "stages.finetune.augment",
            "randaug",
            "augment: unknown value 'randaug'; did you mean the field 'randaugment'?",
        ),
        ("stages.finetune.augment", "VTab", "unknown value 'VTab'; did you mean 'vtab'?"),
        ("stages.finetune.freeze", 2.5, "stages.finetune.freeze: Input should be a valid integer"),
        (
            "stages.pixels.methods",
            ["knn"],
            "stages.pixels.methods.0: unknown value 'knn'; did you mean 'k-NN'?",
        ),
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
            "no stage is called 'train'; with job pretrain or finetune or detect there are: pretrain, finetune_100,",
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
        fields["properties"]["seed"] for fields in schema()["$defs"].values() if "seed" in fields.get("properties", {})
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
        ("probe.shots=[yes, 5]", "probe.shots.0: "),
        ("finetune.search.over.mixup.low=no", ""),
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


VIT = yaml.safe_load(TINY.read_text())["stages"]["pretrain"]["model"]
MASKED, MAE, DISTILLED = ({"objective": name} for name in ("masked_patches", "mae", "distillation"))
MOCO = {"objective": "contrastive", "augment": "crop_flip"}
DINO = {"objective": "dino", "augment": "resized_crop_flip", "dino": {"local_size": 4}}
BESIDE, R50 = {"auxiliary": {"masked_patches": 1}}, {"model": "R50x1"}
PRETRAININGS: list[tuple[dict[str, Any], str]] = [
    ({"objective": "sigmoid", "label_smoothing": 0.5}, "label_smoothing 0.5: with objective sigmoid"),
    (MASKED | {"label_smoothing": 0.1}, "which objective masked_patches does not use"),
    (MASKED | {"model": VIT | {"head_bias": -10}}, "need labels and a classifier, which objective"),
    ({"patch_target": "pixels"}, "patch_target pixels is for objective masked_patches"),
    ({"contrastive": {"temperature": 0.1}}, "that only objective contrastive uses"),
    (MAE | BESIDE, "auxiliary is beside labels, which objective"),
    (BESIDE | R50, "auxiliary needs a ViT"),
    (BESIDE | {"resolution": 4}, "resolution 4 is a single patch; auxiliary"),
    ({"auxiliary": {"masked_patches": 0}}, "should be greater than 0"),
    (DISTILLED, "teacher is missing; objective distillation needs a model to imitate"),
    (DISTILLED | {"distillation": {"temperature": 3}}, "temperature 3.0 is for kind soft"),
    (DISTILLED | {"distillation": {"kind": "features", "weight": 1}}, "weight 1 leaves no labels"),
    (MAE | {"mixup": 0.2}, "which objective mae does not use"),
    (MAE | {"model": VIT | {"pooling": "map"}}, "autoencoder has no head: num_classes is 0"),
    (MAE | {"mae": {"mask_fraction": 0.8}}, "mask_fraction 0.8 of 4 leaves 0 visible"),
    (MAE | R50, "it uses patches; model is a resnet"),
    ({"objective": "contrastive"}, "augment none: both views of objective contrastive would show"),
    (MOCO | {"randaugment": {"magnitude": 10}}, "randaugment cannot be combined with objective contra"),
    (MOCO | {"zero_stage": 3}, "use 1 or 2"),
    (MOCO | {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps 2: objective contrastive"),
    ({"workers": 2, "gradient_accumulation_steps": 32}, "batch_size 32, which is 16 for each of 2 workers"),
    (R50 | {"activation_checkpointing": True}, "the blocks of a ViT; model is a resnet"),
    (MOCO | R50, "MoCo v3 is only implemented for ViTs; model is a resnet"),
    (DINO | R50, "DINO is only implemented for ViTs; model is a resnet"),
    (DINO | {"dino": {}}, "dino.local_size 96 is more than resolution 8; use a smaller multiple of the patch size"),
    (DINO | {"dino": {"local_size": 6}}, "dino.local_size 6 is not a multiple of patch_size 4; 4 or 8 would fit"),
    (DINO | {"dino": {"local_scale": [0.5, 0.1]}}, "local_scale [0.5, 0.1] is not ascending; use [0.1, 0.5]"),
    (DINO | {"dino": {"local_scale": [0, 0.1]}}, "should be greater than 0"),
    (DINO | {"model": VIT | {"position": "relative"}}, "model.position relative cannot be resized to the local views"),
    (DINO | {"augment": "crop_flip"}, "augment crop_flip: objective dino has crops of its own"),
    (DINO | {"augment": "none"}, "augment none: both views of objective dino"),
    (DINO | {"optimizer": {"ema": 0.9}}, "optimizer.ema 0.9: the result of objective dino is its teacher"),
    (DINO | {"zero_stage": 3}, "zero_stage 3: the moving average of objective dino needs whole weights; use 1 or 2"),
    ({"dino": {"local_crops": 2}}, "dino has settings that only objective dino uses; remove it"),
    (MASKED | {"model": VIT | {"pooling": "map"}}, "does not train model.pooling map"),
    (MASKED | {"resolution": 4}, "resolution 4 is a single patch"),
    (MASKED | {"optimizer": {"base_width": 64}}, "base_width 64 is for objectives softmax and sigmoid"),
]
OPTIMIZERS: list[tuple[dict[str, Any], str]] = [
    ({"preset": "swin"}, "stages.pretrain.optimizer.preset: unknown value 'swin'; there are: paper, "),
    ({"warmup_steps": 5, "warmup_fraction": 0.3}, "warmup_fraction 0.3 and warmup_steps 5: give one"),
    ({"warmup_steps": 21}, "stages.pretrain: optimizer.warmup_steps 21 is more than steps 20"),
    ({"preset": "paper"}, "preset paper sets it, for long trainings: give warmup_fraction"),
    ({"cooldown_fraction": 0.1}, "cooldown_fraction 0.1: schedule cosine ends at 0 by itself"),
    ({"timescale": 10}, "timescale 10 is for schedule rsqrt; schedule is cosine"),
    ({"name": "sgd", "betas": [0.9, 0.99]}, "betas [0.9, 0.99] are for adamw; sgd has momentum"),
    ({"name": "sgd", "decay": "times_schedule"}, "sgd adds the decay to the gradient; use times_rate"),
    ({"momentum": 0.95}, "momentum 0.95 is for name sgd or muon; adamw has betas"),
    ({"name": "muon", "base_width": 64}, "base_width 64 is for name adamw; name is muon"),
    ({"name": "muon"}, "zero_stage 1: optimizer.name muon needs whole matrices, which ZeRO divides"),
    ({"ema": 1.0}, "stages.pretrain.optimizer.ema: Input should be less than 1, not 1.0"),
]
OPTIMIZERS_OF_RESNETS: list[tuple[dict[str, Any], str]] = [
    ({"preset": "mae"}, "optimizer.preset mae is for ViTs; model is a resnet, for which there are: paper"),
    ({"name": "muon"}, "optimizer.name muon needs the blocks of a ViT; model is a resnet, for which"),
    ({"base_width": 64}, "optimizer.base_width 64 is for ViTs; model is a resnet"),
    ({"layer_decay": 0.7}, "optimizer.layer_decay 0.7 needs the blocks of a ViT; model is a resnet"),
]
MUON, NEW = {"optimizer": {"name": "muon"}}, {"backbone": None, "model": "Ti/16", "resolution": 32}
FINE_TUNINGS: list[tuple[dict[str, Any], str]] = [
    ({"freeze": "head"}, "stages.finetune.freeze"),
    ({"freeze": "backbone", "head_first": 3}, "head_first 3: freeze backbone trains only the head"),
    (MUON | {"freeze": "backbone"}, "muon is for the matrices of the blocks, which freeze backbone does not"),
    ({"optimizer": {"base_width": 64}}, "base_width 64 is for a new model; a sweep finds the rate of this"),
    (MUON | {"lora": {}}, "muon is for the matrices of the blocks, which lora does not train; use adamw or"),
    ({"lora": {}, "freeze": 2}, "freeze 2: lora trains only its own matrices and the head; leave out freeze"),
    ({"lora": {"rank": 0}}, "stages.finetune.lora.rank: Input should be greater than 0, not 0"),
    (
        {"lora": {"targets": ["query", "fc1"]}},
        "finetune.lora.targets.1: unknown value 'fc1'; there are: query, key",
    ),
    ({"lora": {"targets": ["query", "query"]}}, "contains duplicates"),
    ({"search": over("grid", {"lora.rank": [2, 4]})}, "lora.rank: lora is None, which has no field rank"),
    (
        {"lora": {}, "search": over("grid", {"lora.rank": [2, 0]})},
        "search.over.lora.rank: value 0: lora.rank",
    ),
    ({"head_first": 10_000}, "head_first 10000 must be less than steps"),
    ({"class_weights": {"a": -1.0}}, "stages.finetune.class_weights"),
    (NEW | {"freeze": 1}, "freeze, head_first and lora are for a backbone; the weights of model are new"),
    (NEW | {"stochastic_depth": 0.1}, "stochastic_depth is for a backbone; model.stochastic_depth is for a"),
]


@pytest.mark.parametrize(
    ("stage", "fields", "message"),
    [
        *(("pretrain", *case) for case in PRETRAININGS),
        *(("pretrain", {"optimizer": fields}, message) for fields, message in OPTIMIZERS),
        *(("pretrain", R50 | {"optimizer": fields}, message) for fields, message in OPTIMIZERS_OF_RESNETS),
        *(("finetune", *case) for case in FINE_TUNINGS),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(stage: str, fields: dict[str, Any], message: str) -> None:
    raw = yaml.safe_load(TINY.read_text())
    raw["stages"][stage] |= fields
    with pytest.raises(RecipeError) as error:
        parse_pipeline(raw, "tiny.yaml")
    assert message in str(error.value)


PHOTOS = {"job": "ingest", "source": {"kind": "folder", "root": "/photos", "labels": False}}


@pytest.mark.parametrize("stage", ["pretrain", "finetune", "probe", "pixels"])
def test_stages_that_need_labels_refuse_images_without(stage: str) -> None:
    raw = yaml.safe_load(TINY.read_text())
    raw["stages"] |= {"photos": PHOTOS, stage: raw["stages"][stage] | {"data": "photos"}}
    with pytest.raises(RecipeError, match=rf"stages\.{stage}\.data: photos has no labels .* use embed, or pretrain"):
        parse_pipeline(raw, "tiny.yaml")


SEVERAL = {"job": "ingest", "source": {"kind": "folder", "root": "/photos", "multi_label": True}}


@pytest.mark.parametrize(
    ("stage", "fields", "why"),
    [
        ("pretrain", {}, "pretrain takes one label per image"),
        ("probe", {}, "evaluate takes one label per image"),
        ("pixels", {}, "labels.per_class needs one label per image; leave it out"),
        (
            "pixels",
            {"labels": {}, "methods": ["k-NN", "RBF SVM"]},
            "RBF SVM needs one label per image; set methods, such as [majority, k-NN, logistic regression]",
        ),
        ("pixels", {"labels": {}, "methods": ["k-NN"]}, None),
        (
            "finetune",
            {"labels": {"per_class": 5}},
            "labels.per_class needs one label per image; leave it out",
        ),
        ("finetune", {"select_by": "macro-F1", "labels": {}}, "select_by macro-F1 needs one label per image"),
        ("finetune", {"sampling": "balanced", "labels": {}}, "sampling balanced needs one label per image"),
        ("finetune", {"labels": {}}, None),
    ],
)
def test_stages_refuse_several_labels_by_name(stage: str, fields: dict[str, Any], why: str | None) -> None:
    raw = yaml.safe_load(TINY.read_text())
    raw["stages"] |= {"photos": SEVERAL, stage: raw["stages"][stage] | fields | {"data": "photos"}}
    if why is None:
        assert parse_pipeline(raw, "tiny.yaml").order()
        return
    with pytest.raises(RecipeError) as error:
        parse_pipeline(raw, "tiny.yaml")
    message = f"stages.{stage}.data: photos has several labels per image, but {why}"
    assert message in str(error.value)


def test_what_images_show_decides_which_stages_take_them() -> None:
    """Detectors are trained and promoted on images with boxes, and pixels classified on images with masks."""
    size = {"patch_size": 8, "width": 32, "depth": 1, "num_heads": 2}
    found = {"job": "detect", "data": "photos", "model": size, "resolution": 32, "learning_rates": [0.1]}
    stages = {
        "photos": {"job": "ingest", "source": {"kind": "folder", "root": "/photos", "boxes": "coco"}},
        "found": found | {"steps": 2, "batch_size": 2},
        "promote": {"job": "promote", "data": "photos", "candidate": "found", "against": "@boxes", "floor": 0.1},
    }
    assert parse_pipeline({"name": "boxes", "stages": stages}, "boxes.yaml").order()
    masked = {"kind": "folder", "root": "/photos", "mask_classes": ["sky", "sea"]}
    pixels = {
        "photos": {"job": "ingest", "source": masked},
        "vit": {"job": "import", "path": "m"},
        "segment": {"job": "segment", "data": "photos", "backbone": "vit"},
    }
    assert parse_pipeline({"name": "masks", "stages": pixels}, "masks.yaml").order()
    for wrong, message in (
        (stages | {"photos": pixels["photos"]}, r"stages\.found\.data: photos has no (boxes of objects|labels)"),
        (
            pixels | {"photos": {"job": "ingest", "source": {"kind": "digits"}}},
            r"stages\.segment\.data: photos has no masks",
        ),
    ):
        with pytest.raises(RecipeError, match=message):
            parse_pipeline({"name": "wrong", "stages": wrong}, "wrong.yaml")


def test_stages_that_need_no_labels_take_images_without() -> None:
    raw = yaml.safe_load(TINY.read_text())
    raw["stages"]["photos"] = PHOTOS
    for name, stage in {
        "masked": raw["stages"]["pretrain"] | MASKED | {"data": "photos"},
        "embed": {"job": "embed", "data": "photos", "backbone": "masked"},
        "predict": {
            "job": "predict",
            "data": "photos",
            "backbone": {"stage": "pretrain", "checkpoint": "best"},
        },
    }.items():
        raw["stages"][name] = stage
    assert parse_pipeline(raw, "tiny.yaml").order()
    raw["stages"]["masked"]["fewshot"] = {}
    with pytest.raises(RecipeError, match=r"stages\.masked\.data: photos has no labels.* and no fewshot"):
        parse_pipeline(raw, "tiny.yaml")
    del raw["stages"]["masked"]["fewshot"]
    raw["stages"]["predict"]["backbone"] = "masked"
    with pytest.raises(RecipeError, match=r"stages\.predict\.backbone: masked has no classifier"):
        parse_pipeline(raw, "tiny.yaml")


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


@pytest.mark.parametrize("text", ["010", "08", "-010", "1:30", "12:30:00", "1_000", "1_000.5", "1_0e3", "0b1", "-0x1F"])
def test_a_number_that_readers_of_yaml_read_differently_is_refused(text: str, tmp_path: Path) -> None:
    for quoted in (text, f"[{text}]", f"{{seed: {text}}}"):
        with pytest.raises(RecipeError, match=rf"^--set pretrain.steps=.*: {text} is ambiguous in YAML; write "):
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
    with pytest.raises(RecipeError, match="best is chosen by dev accuracy, which pretrain with objective masked"):
        load_pipeline(str(TINY), settings)
