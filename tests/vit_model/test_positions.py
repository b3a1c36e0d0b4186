"""Position embeddings against scipy, numpy and their formulas. Run: pytest tests/vit_model."""

import math

import numpy as np
import pytest
import torch

from vit_model.blocks import (
    relative_scores,
    resize_axis,
    resize_position_embedding,
    rope,
    rotated,
    sincos2d,
    sincos2d_moco,
)


def table(entries: int, width: int = 5) -> torch.Tensor:
    return torch.randn(1, entries, width, generator=torch.Generator().manual_seed(0))


def test_equal_size_is_the_identity() -> None:
    original = table(17)
    assert torch.equal(resize_position_embedding(original, (4, 4), (4, 4), prefix=1), original)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((14, 14), (24, 24)),
        ((7, 7), (12, 12)),
        ((4, 4), (9, 9)),
        ((6, 6), (3, 3)),
        ((1, 1), (2, 2)),
        ((3, 3), (1, 1)),
        ((4, 4), (4, 7)),
        ((3, 5), (6, 4)),
    ],
)
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_resizing_is_scipys_zoom(old: tuple[int, int], new: tuple[int, int], prefix: int) -> None:
    zoom = pytest.importorskip("scipy.ndimage").zoom
    original = table(prefix + old[0] * old[1])
    resized = resize_position_embedding(original, old, new, prefix)
    patches = original[0, prefix:].reshape(*old, 5).numpy()
    factors = (new[0] / old[0], new[1] / old[1], 1)
    expected = zoom(patches, factors, order=1).reshape(1, new[0] * new[1], 5)
    np.testing.assert_allclose(resized[:, prefix:].numpy(), expected, atol=1e-6)
    assert torch.equal(resized[:, :prefix], original[:, :prefix])


def test_several_tables_are_resized_one_by_one() -> None:
    tables = torch.cat([table(17), table(17) + 1])
    both = resize_position_embedding(tables, (4, 4), (6, 2), prefix=1)
    for index in range(2):
        alone = resize_position_embedding(tables[index : index + 1], (4, 4), (6, 2), prefix=1)
        assert torch.equal(both[index : index + 1], alone)


def test_axes_are_resized_as_numpy_interpolates() -> None:
    original = table(5)
    expected = [np.interp(np.linspace(0, 4, 8), np.arange(5), original[0, :, k].numpy()) for k in range(5)]
    np.testing.assert_allclose(resize_axis(original, 8)[0].numpy(), np.stack(expected, 1), atol=1e-6)


def test_sincos_tells_every_place_by_rows_and_columns() -> None:
    """The formula, entry by entry, in big_vision's order: sin x, cos x, sin y, cos y."""
    rows, columns, width = 3, 5, 16
    found = sincos2d((rows, columns), width)[0].reshape(rows, columns, width)
    for y in range(rows):
        for x in range(columns):
            for k in range(width // 4):
                omega = 10_000 ** (-k / (width // 4 - 1))
                expected = [wave(place * omega) for place in (x, y) for wave in (math.sin, math.cos)]
                np.testing.assert_allclose(found[y, x, k :: width // 4].numpy(), expected, atol=1e-6)


def test_mocos_table_is_the_authors_formula() -> None:
    """Token m of their table is at (m // columns, m % columns), and the first half is of the former: sin, cos, sin,
    cos, with omega = 10000 ** -(i / (width / 4))."""
    rows, columns, width = 3, 5, 16
    found = sincos2d_moco((rows, columns), width)[0]
    for m in range(rows * columns):
        for i in range(width // 4):
            omega = 1 / 10_000 ** (i / (width // 4))
            first, second = m // columns * omega, m % columns * omega
            expected = [math.sin(first), math.cos(first), math.sin(second), math.cos(second)]
            np.testing.assert_allclose(found[m, i :: width // 4].numpy(), expected, atol=1e-6)
    assert (found - sincos2d((rows, columns), width)[0]).abs().max() > 0.5


def test_rope_depends_on_the_distance_of_two_patches_in_the_image() -> None:
    """Two patches have the same scores as any other two that are as far apart, in heights and widths of the image."""
    grid, e = (3, 4), 8
    query, key = torch.randn(2, e, generator=torch.Generator().manual_seed(0))
    every = [rotated(one.expand(1, 1, 12, e), rope(grid, e))[0, 0].view(*grid, e) for one in (query, key)]
    finer = [rotated(one.expand(1, 1, 48, e), rope((6, 8), e))[0, 0].view(6, 8, e) for one in (query, key)]
    first = every[0][0, 0] @ every[1][1, 2]
    for other in (every[0][1, 1] @ every[1][2, 3], finer[0][0, 0] @ finer[1][2, 4], finer[0][3, 1] @ finer[1][5, 5]):
        torch.testing.assert_close(other, first)
    assert not torch.allclose(every[0][0, 0] @ every[1][2, 1], first)
    prefix = torch.randn(1, 1, 13, e)
    assert torch.equal(rotated(prefix, rope(grid, e))[:, :, 0], prefix[:, :, 0])


def test_relative_scores_are_query_times_the_distances_embedding() -> None:
    query = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(1))
    embeddings = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    scores = relative_scores(query, embeddings)
    for q in range(5):
        for k in range(5):
            expected = query[:, :, q] @ embeddings[q - k + 4]
            torch.testing.assert_close(scores[:, :, q, k], expected)
