"""Presets fill the optimizer's fields; what does not fit one another is refused in test_spec.py."""

from typing import Any

import pytest

from pipelines.identity.key import identity_fields
from pipelines.spec import Optimizer
from pipelines.spec.optimizer import PRESETS
from ray_jobs.training.optim import warmup_steps


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
