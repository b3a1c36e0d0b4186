"""Presets fill the optimizer's fields, and settings that do not fit one another are refused."""

from typing import Any

import pytest

from pipelines.identity.key import identity_fields
from pipelines.recipe.load import parse_pipeline
from pipelines.spec import Optimizer, RecipeError
from pipelines.spec.optimizer import PRESETS
from ray_jobs.training.optim import warmup_steps
from tests.support.recipes import changed


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_fields_written_out(preset: Any) -> None:
    optimizer = Optimizer(preset=preset)
    assert identity_fields(optimizer) == identity_fields(Optimizer.model_validate(PRESETS[preset]))
    assert Optimizer.model_validate_json(optimizer.model_dump_json()) == optimizer
    assert optimizer.preset == preset


def test_given_fields_win_over_a_presets() -> None:
    optimizer = Optimizer.model_validate({"preset": "paper", "weight_decay": 0.03, "warmup_fraction": 0.2})
    assert (optimizer.weight_decay, optimizer.betas) == (0.03, (0.9, 0.999))
    assert warmup_steps(optimizer, 100) == 20, "warmup_fraction replaces the preset's warmup_steps"
    for preset in PRESETS:
        counted = Optimizer.model_validate({"preset": preset, "warmup_steps": 7})
        assert warmup_steps(counted, 100) == 7, "warmup_steps replaces the preset's warmup_fraction"
    assert Optimizer.model_validate_json(optimizer.model_dump_json()) == optimizer


def test_momentum_is_that_of_the_optimizer_and_its_default_is_not_in_the_key() -> None:
    for name, momentum in {"sgd": 0.9, "muon": 0.95}.items():
        optimizer = Optimizer.model_validate({"name": name})
        assert optimizer.momentum == momentum
        assert "momentum" not in identity_fields(optimizer)
        assert Optimizer.model_validate_json(optimizer.model_dump_json()) == optimizer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"freeze": "head"}, "stages.finetune.freeze"),
        ({"freeze": -1}, "stages.finetune.freeze"),
        (
            {"freeze": "backbone", "head_first": 3},
            "head_first 3: freeze backbone trains only the head in all steps",
        ),
        (
            {"freeze": "backbone", "optimizer": {"name": "muon"}},
            "optimizer.name muon is for the matrices of the blocks, which freeze backbone does not train",
        ),
        (
            {"freeze": "all_but_biases", "optimizer": {"name": "muon"}},
            "optimizer.name muon is for the matrices of the blocks, which freeze all_but_biases does not train",
        ),
        (
            {"lora": {}, "optimizer": {"name": "muon"}},
            "optimizer.name muon is for the matrices of the blocks, which lora does not train; use adamw or sgd",
        ),
        (
            {"lora": {}, "freeze": 2},
            "freeze 2: lora trains only its own matrices and the head; leave out freeze or",
        ),
        ({"lora": {"rank": 0}}, "stages.finetune.lora.rank: Input should be greater than 0, not 0"),
        (
            {"lora": {"targets": ["query", "fc1"]}},
            "stages.finetune.lora.targets.1: Input should be 'query', 'key'",
        ),
        ({"lora": {"targets": ["query", "query"]}}, "contains duplicates"),
        (
            {"search": {"kind": "grid", "over": {"lora.rank": [2, 4]}}},
            "lora.rank: lora is None, which has no field rank",
        ),
        (
            {"lora": {}, "search": {"kind": "grid", "over": {"lora.rank": [2, 0]}}},
            "stages.finetune.search.over.lora.rank: value 0: lora.rank Input should be greater than 0",
        ),
        ({"head_first": 10_000}, "head_first 10000 must be less than steps"),
        ({"class_weights": {"a": -1.0}}, "stages.finetune.class_weights"),
        ({"sampling": "class"}, "stages.finetune.sampling: Input should be 'uniform' or 'balanced'"),
        (
            {"backbone": None, "model": "Ti/16", "resolution": 32, "freeze": 1},
            "freeze, head_first and lora are for a backbone; the weights of model are new",
        ),
        (
            {"backbone": None, "model": "Ti/16", "resolution": 32, "stochastic_depth": 0.1},
            "stochastic_depth is for a backbone; model.stochastic_depth is for a new model",
        ),
    ],
)
def test_fine_tunings_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    raw = changed("name", "x")
    raw["stages"]["finetune"] |= fields
    with pytest.raises(RecipeError) as refused:
        parse_pipeline(raw, "recipe.yaml")
    assert message in str(refused.value)


RESNET = {"family": "resnet", "units": [1, 1, 1, 1]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"preset": "swin"},
            "stages.pretrain.optimizer.preset: Input should be 'paper', 'paper_finetuning', ",
        ),
        ({"warmup_steps": 5, "warmup_fraction": 0.3}, "warmup_fraction 0.3 and warmup_steps 5: give one"),
        ({"warmup_steps": 21}, "stages.pretrain: optimizer.warmup_steps 21 is more than steps 20"),
        (
            {"preset": "paper"},
            "more than steps 20; preset paper sets it, for long trainings: give warmup_fraction",
        ),
        ({"cooldown_fraction": 0.1}, "cooldown_fraction 0.1: schedule cosine ends at 0 by itself"),
        ({"timescale": 10}, "timescale 10 is for schedule rsqrt; schedule is cosine"),
        ({"name": "sgd", "betas": [0.9, 0.99]}, "betas [0.9, 0.99] are for adamw; sgd has momentum"),
        ({"name": "sgd", "decay": "times_schedule"}, "sgd adds the decay to the gradient; use times_rate"),
        ({"momentum": 0.95}, "momentum 0.95 is for name sgd or muon; adamw has betas"),
        ({"name": "muon", "momentum": 1.0}, "momentum: Input should be less than 1, not 1.0"),
        (
            {"name": "muon"},
            "zero_stage 1: optimizer.name muon needs whole matrices, which ZeRO divides; use zero_stage: 0",
        ),
        ({"name": "moun"}, "stages.pretrain.optimizer.name: Input should be 'adamw', 'sgd' or 'muon'"),
        ({"ema": 1.0}, "stages.pretrain.optimizer.ema: Input should be less than 1, not 1.0"),
        ({"layer_decay": 0.0}, "stages.pretrain.optimizer.layer_decay: Input should be greater than 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        parse_pipeline(changed("stages.pretrain.optimizer", fields), "recipe.yaml")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"preset": "mae"},
            "optimizer.preset mae is for ViTs; model is a resnet, for which there are: paper, paper",
        ),
        ({"name": "muon"}, "optimizer.name muon needs the blocks of a ViT; model is a resnet, for which"),
        ({"layer_decay": 0.7}, "optimizer.layer_decay 0.7 needs the blocks of a ViT; model is a resnet"),
    ],
)
def test_settings_of_vits_are_refused_for_a_resnet(fields: dict[str, Any], message: str) -> None:
    raw = changed("stages.pretrain.optimizer", fields)
    raw["stages"]["pretrain"]["model"] = RESNET
    with pytest.raises(RecipeError) as refused:
        parse_pipeline(raw, "recipe.yaml")
    assert message in str(refused.value)
