"""A small pretraining, of which a test gives what it is about."""

from typing import Any

from pipelines.spec import Pretrain

DEEP = {"patch_size": 4, "width": 16, "depth": 2, "num_heads": 2}


def pretraining(**fields: Any) -> Pretrain:
    """Return a pretraining of one step on 16 images of 8x8, but for these fields."""
    base = {"job": "pretrain", "data": "d", "model": DEEP, "resolution": 8, "steps": 1}
    return Pretrain.model_validate(base | {"batch_size": 16, "learning_rate": 3e-3} | fields)
