"""Resizing of position embeddings against scipy. Run: pytest tests/vit_model."""

import numpy as np
import pytest
import torch

from vit_model.positions import resize_position_embedding


def table(entries: int, width: int = 5) -> torch.Tensor:
    return torch.randn(1, entries, width, generator=torch.Generator().manual_seed(0))


def test_equal_size_is_the_identity() -> None:
    original = table(17)
    assert torch.equal(resize_position_embedding(original, 4, class_token=True), original)


@pytest.mark.parametrize(("old", "new"), [(14, 24), (7, 12), (4, 9), (6, 3), (1, 2), (3, 1)])
@pytest.mark.parametrize("class_token", [True, False])
def test_resizing_is_scipys_zoom(old: int, new: int, class_token: bool) -> None:
    zoom = pytest.importorskip("scipy.ndimage").zoom
    original = table(old * old + class_token)
    resized = resize_position_embedding(original, new, class_token)
    patches = original[0, int(class_token) :].reshape(old, old, 5).numpy()
    expected = zoom(patches, (new / old, new / old, 1), order=1).reshape(1, new * new, 5)
    np.testing.assert_allclose(resized[:, int(class_token) :].numpy(), expected, atol=1e-6)
    assert torch.equal(resized[:, : int(class_token)], original[:, : int(class_token)])


def test_entries_that_form_no_square_are_refused() -> None:
    with pytest.raises(ValueError, match="of 17 patches is not a square grid"):
        resize_position_embedding(table(17), 4, class_token=False)
