"""Losses against their definitions. Run: pytest tests/vit_model."""

import pytest
import torch

from vit_model.objectives import softmax_cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_cross_entropy_is_its_definition(smoothing: float) -> None:
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    labels = torch.tensor([0, 4, 2, 2, 1, 3])
    target = torch.full((6, 5), smoothing / 5, dtype=torch.float64)
    target[torch.arange(6), labels] += 1 - smoothing
    expected = -(target * logits.double().log_softmax(dim=1)).sum(dim=1).mean()
    assert softmax_cross_entropy(logits, labels, smoothing).item() == pytest.approx(expected.item(), rel=1e-6)


def test_half_precision_logits_are_summed_in_full() -> None:
    logits = torch.randn(8, 713, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(8)
    loss = softmax_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(logits.double(), labels).item()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
