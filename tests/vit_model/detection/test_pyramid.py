"""The simple feature pyramid: its scales, and what it computes, written out."""

import torch
import torch.nn.functional as F

from vit_model.detection.pyramid import SCALES, SimpleFeaturePyramid
from vit_model.parts import as_map


def norm(x: torch.Tensor) -> torch.Tensor:
    """Return maps [b, c, rows, columns] with mean 0 and variance 1 over their channels."""
    return (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-6).sqrt()


def test_the_maps_are_those_of_the_paper() -> None:
    torch.manual_seed(0)
    pyramid, tokens = SimpleFeaturePyramid(16, 8), torch.randn(2, 16, 4, 6)
    maps = pyramid(tokens)
    assert [tuple(each.shape) for each in maps] == [(2, 8, round(4 * scale), round(6 * scale)) for scale in SCALES]
    quadruple, double, same, half = ([*level] for level in pyramid.levels)
    starts = [
        quadruple[3](F.gelu(norm(quadruple[0](tokens)))),
        double[0](tokens),
        tokens,
        F.max_pool2d(tokens, 2),
    ]
    for found, start, level in zip(maps, starts, (quadruple, double, same, half), strict=True):
        first, _, second, _ = level[-4:]
        expected = norm(F.conv2d(norm(F.conv2d(start, first.weight)), second.weight, padding=1))
        torch.testing.assert_close(found, expected)


def test_tokens_are_in_raster_order() -> None:
    tokens = torch.arange(6.0).reshape(1, 6, 1)
    assert as_map(tokens, (2, 3)).tolist() == [[[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]]]
