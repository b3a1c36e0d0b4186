"""Array files as MATLAB and LeCun's lush write them."""

import io
import struct

import numpy as np
import scipy

RNG = np.random.default_rng(0)
SYNSETS = np.array(
    [(1, "n02119789", "kit fox", 0), (2, "n02100735", "English setter", 0)],
    dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")],
)
VARIABLES = {
    "X": RNG.integers(0, 256, (32, 32, 3, 5), np.uint8),
    "y": np.array([[10], [1], [2], [3], [4]], np.uint8),
    "labels": RNG.normal(size=(1, 7)),
    "synsets": SYNSETS,
    "empty": np.zeros((0, 0)),
    "text": "hello",
    "words": np.array(["abc", "defgh"]),
    "one": np.uint16(7),
    "cells": np.array([1.5, "two", np.arange(3)], dtype=object),
}
"""Of every type that MATLAB's files have."""


def mat(content: dict[str, object], *, compress: bool) -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, content, do_compression=compress)
    return file.getvalue()


def norb(array: np.ndarray) -> bytes:
    """As LeCun's lush writes it: fewer than three sizes are filled up with ones."""
    magic = {"uint8": 0x1E3D4C55, "int32": 0x1E3D4C54}[array.dtype.name]
    sizes = (*array.shape, *[1] * (3 - array.ndim))
    return struct.pack(f"<Ii{len(sizes)}i", magic, array.ndim, *sizes) + array.tobytes()
