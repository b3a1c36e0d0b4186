"""Losses against their definitions. Run: pytest tests/vit_model."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.vits import TINY
from vit_model.config import ViTConfig
from vit_model.model import ViT
from vit_model.objectives.losses import sigmoid_cross_entropy, softmax_cross_entropy

Loss = Callable[..., Tensor]


def random_logits(b: int, classes: int) -> Tensor:
    return 3 * torch.randn(b, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 2.0, 3.0])], ids=["plain", "weighted"])
def test_softmax_cross_entropy_is_its_definition(weights: Tensor | None, smoothing: float) -> None:
    """For labels and for probabilities; weights multiply the terms of their classes."""
    logits, labels = random_logits(6, 3).float(), torch.tensor([0, 1, 2, 2, 1, 0])
    classes = torch.eye(3)[labels]
    terms = ((1 - smoothing) * classes + smoothing / 3) * logits.double().log_softmax(1)
    expected = -(terms if weights is None else weights * terms).sum() / 6
    for given in (labels, classes):
        loss = softmax_cross_entropy(logits, given, smoothing, weights)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 1e-4, 0.1])
def test_sigmoid_cross_entropy_sums_over_classes_and_averages_over_the_batch(smoothing: float) -> None:
    logits, labels = random_logits(6, 5).float(), [0, 4, 2, 2, 1, 3]
    total = 0.0
    for row, label in zip(logits.tolist(), labels, strict=True):
        for number, logit in enumerate(row):
            yes = 1 / (1 + math.exp(-logit))
            target = 1 - smoothing if number == label else smoothing
            total -= target * math.log(yes) + (1 - target) * math.log(1 - yes)
    found = sigmoid_cross_entropy(logits, torch.tensor(labels), smoothing)
    assert found.item() == pytest.approx(total / 6, rel=1e-6)


@pytest.mark.parametrize(("classes", "bias", "expected"), [(21_843, -10.0, 0.99 + 10), (1000, -6.9, 1.01 + 6.9)])
def test_a_model_with_the_authors_head_bias_starts_from_their_loss(classes: int, bias: float, expected: float) -> None:
    config = ViTConfig(**TINY, num_classes=classes, representation_head=True, head_bias=bias)
    logits = ViT(config)(torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    loss = sigmoid_cross_entropy(logits, torch.tensor([0, 7, classes - 1]))
    assert loss.item() == pytest.approx(expected, abs=0.01)


def test_sigmoid_cross_entropy_survives_logits_of_any_size() -> None:
    logits = torch.tensor([[1e4, -1e4, -1e4], [1e4, -1e4, -1e4]], requires_grad=True)
    loss = sigmoid_cross_entropy(logits, torch.tensor([0, 1]))
    assert loss.item() == pytest.approx((0 + 2e4) / 2)
    loss.backward()
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad, [[0, 0, 0], [0.5, -0.5, 0]])


@pytest.mark.parametrize("loss", [softmax_cross_entropy, sigmoid_cross_entropy])
def test_half_precision_logits_are_summed_in_full(loss: Loss) -> None:
    logits, labels = random_logits(8, 713).bfloat16(), torch.arange(8)
    found = loss(logits, labels)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(loss(logits.double(), labels).item(), rel=1e-6)
