"""Google's ViTs in numpy, as their JAX code computes them, from a file alone: nothing of vitflow is used here.

Written from the layout of the files and from vit_jax/models_vit.py and models_resnet.py, big_vision/models/vit.py.
Images are [batch, height, width, channels]; everything is computed in the dtype of the images.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[Any]


def forward(path: Path, images: Array) -> Array:
    """Logits; the representation where the file has no head. Names of the paper's files, or big_vision's."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name].astype(images.dtype) for name in archive.files}
    maps = resnet(arrays, images) if "conv_root/kernel" in arrays else images
    x = convolve(maps, arrays["embedding/kernel"], arrays["embedding/kernel"].shape[0], "VALID")
    x = (x + arrays["embedding/bias"]).reshape(len(x), -1, x.shape[-1])
    if "pos_embedding" in arrays:  # big_vision: first the positions, then the class token
        x = x + arrays["pos_embedding"]
    if "cls" in arrays:
        x = np.concatenate([np.repeat(arrays["cls"], len(x), axis=0), x], axis=1)
    if "Transformer/posembed_input/pos_embedding" in arrays:
        x = x + arrays["Transformer/posembed_input/pos_embedding"]
    layer = 0
    while f"Transformer/encoderblock_{layer}/LayerNorm_0/scale" in arrays:
        x = block(arrays, f"Transformer/encoderblock_{layer}/", x)
        layer += 1
    x = layer_norm(arrays, "Transformer/encoder_norm/", x)
    y = x[:, 0] if "cls" in arrays else x.mean(axis=1)
    if "MAPHead_0/probe" in arrays:
        y = map_head(arrays, x)
    if "pre_logits/kernel" in arrays:
        y = np.tanh(dense(arrays, "pre_logits/", y))
    return dense(arrays, "head/", y) if "head/kernel" in arrays else y


def block(arrays: dict[str, Array], name: str, x: Array) -> Array:
    old = f"{name}MlpBlock_3/Dense_0/kernel" in arrays
    attention, norm, mlp = (
        ("MultiHeadDotProductAttention_1/", "LayerNorm_2/", "MlpBlock_3/")
        if old
        else ("MultiHeadDotProductAttention_0/", "LayerNorm_1/", "MlpBlock_0/")
    )
    y = layer_norm(arrays, f"{name}LayerNorm_0/", x)
    x = x + attend(arrays, name + attention, y, y)
    return x + perceptron(arrays, name + mlp, layer_norm(arrays, name + norm, x))


def attend(arrays: dict[str, Array], name: str, of: Array, to: Array) -> Array:
    query, key, value = (
        np.einsum("bnd,dhe->bnhe", x, arrays[f"{name}{kind}/kernel"]) + arrays[f"{name}{kind}/bias"]
        for kind, x in (("query", of), ("key", to), ("value", to))
    )
    scores = np.einsum("bqhe,bkhe->bhqk", query / np.sqrt(query.shape[-1]).astype(of.dtype), key)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = np.einsum("bhqk,bkhe->bqhe", scores / scores.sum(axis=-1, keepdims=True), value)
    return np.einsum("bqhe,hed->bqd", mixed, arrays[f"{name}out/kernel"]) + arrays[f"{name}out/bias"]


def map_head(arrays: dict[str, Array], x: Array) -> Array:
    probe = np.repeat(arrays["MAPHead_0/probe"], len(x), axis=0)
    y = attend(arrays, "MAPHead_0/MultiHeadDotProductAttention_0/", probe, x)
    normed = layer_norm(arrays, "MAPHead_0/LayerNorm_0/", y)
    return (y + perceptron(arrays, "MAPHead_0/MlpBlock_0/", normed))[:, 0]


def perceptron(arrays: dict[str, Array], name: str, x: Array) -> Array:
    x = dense(arrays, f"{name}Dense_0/", x)
    x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x**3)))
    return dense(arrays, f"{name}Dense_1/", x)


def dense(arrays: dict[str, Array], name: str, x: Array) -> Array:
    return x @ arrays[f"{name}kernel"] + arrays[f"{name}bias"]


def layer_norm(arrays: dict[str, Array], name: str, x: Array) -> Array:
    x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6)
    return x * arrays[f"{name}scale"] + arrays[f"{name}bias"]


def resnet(arrays: dict[str, Array], x: Array) -> Array:
    x = convolve(x, standardised(arrays["conv_root/kernel"]), 2, "SAME")
    x = np.maximum(group_norm(arrays, "gn_root/", x), 0)
    x = windows(x, 3, 2, "SAME", fill=-np.inf).max(axis=(-1, -2))
    stage = 1
    while f"block{stage}/unit1/conv1/kernel" in arrays:
        unit = 1
        while f"block{stage}/unit{unit}/conv1/kernel" in arrays:
            x = bottleneck(arrays, f"block{stage}/unit{unit}/", x, 2 if stage > 1 and unit == 1 else 1)
            unit += 1
        stage += 1
    return x


def bottleneck(arrays: dict[str, Array], name: str, x: Array, stride: int) -> Array:
    def convolved(x: Array, which: str, stride: int = 1) -> Array:
        x = convolve(x, standardised(arrays[f"{name}conv{which}/kernel"]), stride, "SAME")
        return group_norm(arrays, f"{name}gn{which}/", x)

    y = np.maximum(convolved(x, "1"), 0)
    y = np.maximum(convolved(y, "2", stride), 0)
    y = convolved(y, "3")
    return np.maximum((convolved(x, "_proj", stride) if f"{name}conv_proj/kernel" in arrays else x) + y, 0)


def standardised(kernel: Array) -> Array:
    kernel = kernel - kernel.mean(axis=(0, 1, 2))
    return kernel / (kernel.std(axis=(0, 1, 2)) + 1e-5)


def group_norm(arrays: dict[str, Array], name: str, x: Array) -> Array:
    grouped = x.reshape(*x.shape[:3], 32, -1)
    mean, variance = (f(grouped, axis=(1, 2, 4), keepdims=True) for f in (np.mean, np.var))
    normed = ((grouped - mean) / np.sqrt(variance + 1e-6)).reshape(x.shape)
    return normed * arrays[f"{name}scale"] + arrays[f"{name}bias"]


def convolve(x: Array, kernel: Array, stride: int, padding: str) -> Array:
    return np.einsum("bhwcij,ijcd->bhwd", windows(x, kernel.shape[0], stride, padding), kernel)


def windows(x: Array, size: int, stride: int, padding: str, fill: float = 0.0) -> Array:
    """[b, rows, columns, c, size, size]: what a kernel sees at each place; SAME pads the odd pixel behind."""
    if padding == "SAME":
        totals = [max(0, (-(-side // stride) - 1) * stride + size - side) for side in x.shape[1:3]]
        borders = [(0, 0), *((total // 2, total - total // 2) for total in totals), (0, 0)]
        x = np.pad(x, borders, constant_values=fill)
    return sliding_window_view(x, (size, size), axis=(1, 2))[:, ::stride, ::stride]
