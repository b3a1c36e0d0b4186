"""Readers of images as their authors ship them, one module per family, and what they share.

`catalog` knows them all, `entries` says what each gives. Only the standard library is imported here and by `folder`,
so that `vitflow init` can look at a folder.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def hash_fraction(salt: str, identity: str) -> float:
    """A number in [0, 1), uniform over identities, a pure function of both strings: it draws splits."""
    digest = hashlib.sha256(f"{salt}\0{identity}".encode()).digest()
    return (int.from_bytes(digest[:8]) >> 11) / 2**53


def counts_to_uint8(counts: NDArray[Any]) -> NDArray[np.uint8]:
    """Ink counts 0..16 of 4x4 blocks as grey values 0..255; digits and glyphs are stored by the same rule."""
    import numpy as np

    return np.round(counts * (255 / 16)).astype(np.uint8)
