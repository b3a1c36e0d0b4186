"""Readers of image datasets in the form in which their authors ship them, one module per family.

`catalog` lists all readers, `archives.entries` describes their interface.

Modules here import slow libraries that few sources need (boto3, fontTools) inside functions. Libraries that an
untrusted file could crash run in `archives.sandbox`.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def hash_fraction(salt: str, identity: str) -> float:
    """Hash both strings to a number in [0, 1), uniform over identities, to draw splits."""
    digest = hashlib.sha256(f"{salt}\0{identity}".encode()).digest()
    return (int.from_bytes(digest[:8]) >> 11) / 2**53


def counts_to_uint8(counts: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert ink counts 0..16 of 4x4 blocks to grey values 0..255, as digits and glyphs are stored."""
    return np.round(counts * (255 / 16)).astype(np.uint8)
