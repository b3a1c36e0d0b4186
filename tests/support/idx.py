"""IDX files, which MNIST and its successors are distributed in."""

import struct

import numpy as np

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def encoded(array: np.ndarray) -> bytes:
    """As the authors' format says, written by hand."""
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
