"""Inspection of a ViT's attention and embeddings: the analyses of sections 4.5, D.7 and D.8 as arrays.

In: a `ViT`, in any mode and on any device, and images as its `forward` takes them; or a model's folder and pixels.
Out: numpy arrays on the CPU. The model is left unchanged: no hooks, no gradients, the same mode.
Use: `attention_distance(model, images).shape == (blocks, heads)`; `inspect(folder, pixels, device)` for all of them.

Letters in shapes: b batch, n tokens, h heads, p patch size, c channels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit_model.blocks import Block
from vit_model.build import Network
from vit_model.config import ViTConfig
from vit_model.errors import UserError
from vit_model.model import ViT, split_lines
from vit_model.preprocessing import normalise
from vit_model.weights import load_model

# Attention weights of one layer that are held at a time if only a summary is needed: 256 MiB.
_WEIGHTS_AT_A_TIME = 2**26


class Inspection(NamedTuple):
    """The analyses of one model; None for those that its architecture does not have."""

    distance: NDArray[np.float64]
    """`attention_distance` over all images"""
    rollout: NDArray[np.float32] | None
    """`attention_rollout` of the first images; None: the model is axial"""
    components: NDArray[np.float64] | None
    """`patch_embedding_components`; None: a hybrid's filters do not apply to pixels"""
    similarity: NDArray[np.float32] | None
    """`position_similarity`; None: the model has no position embeddings"""
    uniform: float
    """the distance of heads that attend to all patches equally"""


def inspect(
    folder: Path, pixels: NDArray[np.uint8], device: torch.device, rollouts: int = 12, components: int = 28
) -> Inspection:
    """Load the model in `folder` and analyse it on these images, [b, resolution, resolution, channels].

    Args:
        rollouts: the number of images, from the first, whose rollout is computed.
        components: of the patch embedding, at most; the paper shows 28.

    Raises UserError for a model that is not a ViT.
    """
    network, contract = load_model(folder)
    config = _vit(network, "inspection").config
    network.to(device)
    images = normalise(torch.from_numpy(pixels), contract.preprocessing, torch.float32)
    count = min(components, config.width, config.in_channels * config.patch_size**2)
    return Inspection(
        attention_distance(network, images),
        None if config.axial else attention_rollout(network, images[:rollouts]),
        patch_embedding_components(network, count) if config.stem is None else None,
        position_similarity(network) if config.adds_positions else None,
        _distances((1, config.grid[1]) if config.axial else config.grid, config.patch_size).mean().item(),
    )


def attention_weights(network: Network, images: Tensor) -> list[NDArray[np.float32]]:
    """Return the attention weights between tokens, [b, h, n, n] per block; rows sum to 1.

    Tokens are in the model's order: class token, distillation token, registers, patches in raster order. An axial
    block has [b, lines, h, m, m]: m tokens in each row of the grid (blocks 0, 2, ...) or in each column (1, 3, ...).
    All blocks are held at once: 4 b h n^2 bytes each.

    Raises UserError for a model that is not a ViT, ValueError for images of the wrong size.
    """
    model = _vit(network, "attention")
    with _inference(model):
        return [weights.cpu().numpy() for weights in _walk(model, images)]


def attention_distance(network: Network, images: Tensor) -> NDArray[np.float64]:
    """Return the mean distance in pixels from a patch to those it attends to, [blocks, h] (figure 7 right, D.7).

    Computed as by the authors (google-research/vision_transformer, issue 162): the weights between patches are not
    renormalised after the other tokens are left out, and the mean is over patches and images (128 in the paper).
    Uniform attention on 14 x 14 patches of 16 pixels gives 116.5, or 196 / 197 of that with a class token. In an axial
    model the distance is along the row or column that a block sees.

    Raises UserError for a model that is not a ViT, ValueError for images of the wrong size.
    """
    model = _vit(network, "attention distance")
    config = model.config
    totals = torch.zeros(config.num_blocks, config.num_heads, dtype=torch.float64)
    with _inference(model):
        for batch in _batches(config, images):
            for index, weights in enumerate(_walk(model, batch)):
                between = weights[..., config.num_prefix_tokens :, config.num_prefix_tokens :]
                line = (1, between.shape[-1]) if config.axial else config.grid
                distances = _distances(line, config.patch_size).to(weights)
                by_query = (between * distances).sum(dim=-1, dtype=torch.float64)  # [..., h, queries]
                totals[index] += by_query.sum(dim=-1).view(-1, config.num_heads).sum(dim=0).cpu()
    return (totals / (len(images) * config.num_patches)).numpy()


def attention_rollout(network: Network, images: Tensor) -> NDArray[np.float32]:
    """Return how much of each patch reaches the representation, [b, rows, columns], scaled to a maximum of 1.

    Figure 6 and D.8 (Abnar and Zuidema 2020): each block contributes the mean of its heads averaged with the identity
    (for the residual connection; without one, only the mean), multiplied from the first block upward. The result is the
    class token's row of the product, or the mean of the patches' rows if the representation is not the class token.
    That is exact for the mean over tokens; for a MAP head it assumes a query that attends to all patches equally.

    Raises UserError for an axial model or one that is not a ViT, ValueError for images of the wrong size.
    """
    model = _vit(network, "attention rollout")
    config = model.config
    if config.axial:
        raise UserError(
            "attention rollout needs weights between all tokens; this model is axial, so a block only has weights"
            " within a row or column"
        )
    maps = []
    with _inference(model):
        for batch in _batches(config, images):
            identity = torch.eye(config.num_tokens, device=_device(model))
            product = identity.expand(len(batch), -1, -1)
            for weights in _walk(model, batch):
                mixed = weights.mean(dim=1)
                product = ((mixed + identity) / 2 if config.residual else mixed) @ product
            patches = product[..., config.num_prefix_tokens :]
            read = patches[:, 0] if config.pooling == "cls" else patches[:, -config.num_patches :].mean(dim=1)
            maps.append((read / read.amax(dim=1, keepdim=True)).cpu().view(-1, *config.grid))
    return torch.cat(maps).numpy()


def patch_embedding_components(network: Network, count: int = 28) -> NDArray[np.float64]:
    """Return the first principal components of the patch embedding's filters, [count, p, p, c] (figure 7 left).

    They have norm 1 and are sorted by variance over the d filters; their largest entries are positive. In a hybrid the
    filters apply to the stem's feature map: p counts its pixels and c its channels.

    Raises UserError if there are fewer components, or for a model that is not a ViT.
    """
    embed = _vit(network, "the patch embedding").patch_embed
    filters = embed.proj.weight.detach().double().cpu().numpy()  # [d, c * p * p]
    if not 1 <= count <= min(filters.shape):
        raise UserError(
            f"count is {count}; {filters.shape[0]} filters of {filters.shape[1]} weights have"
            f" {min(filters.shape)} principal components, so it must be from 1 to {min(filters.shape)}"
        )
    components = np.linalg.svd(filters - filters.mean(axis=0), full_matrices=False)[2][:count]
    largest = np.take_along_axis(components, np.abs(components).argmax(axis=1)[:, None], axis=1)
    kernels = (components * np.sign(largest)).reshape(count, -1, embed.patch_size, embed.patch_size)
    tiles: NDArray[np.float64] = kernels.transpose(0, 2, 3, 1)
    return tiles


def position_similarity(network: Network, layer: int = 0) -> NDArray[np.float32]:
    """Return the cosines between the patches' position embeddings, [rows, columns, rows, columns] (figure 7 centre).

    Entry [i, j] is the tile of the patch in row i and column j; the class token's embedding is left out. `layer`
    chooses the table if each block has its own.

    Raises UserError if patches have no embeddings, the layer has no table, or the model is not a ViT.
    """
    model = _vit(network, "position similarity")
    config = model.config
    if not config.adds_positions:
        raise UserError(
            f"position similarity needs position embeddings; a model with position {config.position!r} has none"
        )
    tables = config.num_blocks if config.position_at == "every_layer" else 1
    if not 0 <= layer < tables:
        raise UserError(f"layer is {layer}; with position_at {config.position_at!r} it must be from 0 to {tables - 1}")
    with torch.no_grad():
        table = model.positions(layer)
        assert table is not None
        places = torch.nn.functional.normalize(table[0, config.num_prefix_tokens :].float(), dim=1)
        return (places @ places.T).cpu().numpy().reshape(*config.grid, *config.grid)


def _vit(network: Network, analysis: str) -> ViT:
    if not isinstance(network, ViT):
        raise UserError(f"{analysis} needs a ViT; this model is a {type(network).__name__}")
    return network


@contextmanager
def _inference(model: ViT) -> Iterator[None]:
    """Disable gradients and dropout; restore every module's mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _walk(model: ViT, images: Tensor) -> Iterator[Tensor]:
    """Yield the attention weights of each block, as `attention_weights` describes them."""
    config = model.config
    states = model.states(model.embed(images.to(_device(model))))
    # The last state is the output, so there is one more state than blocks.
    for index, (module, x) in enumerate(zip(model.blocks, states, strict=False)):
        block = cast(Block, module)
        if config.axial:
            lines = split_lines(x, config.grid, index % 2)
            weights = block.attn.weights(block.norm1(lines.flatten(0, 1)))
            yield weights.view(*lines.shape[:2], *weights.shape[1:])
        else:
            yield block.attn.weights(block.norm1(x), model.angles())


def _batches(config: ViTConfig, images: Tensor) -> tuple[Tensor, ...]:
    """Split the images so that one layer's weights of a part fit `_WEIGHTS_AT_A_TIME`."""
    return torch.split(images, max(1, _WEIGHTS_AT_A_TIME // (config.num_heads * config.num_tokens**2)))


def _device(model: ViT) -> torch.device:
    return model.patch_embed.proj.weight.device


def _distances(grid: tuple[int, int], patch_size: int) -> Tensor:
    """Return the Euclidean distances in pixels between the patches of a grid, [n, n]."""
    places = torch.cartesian_prod(*(torch.arange(side) for side in grid)).double()
    distances: Tensor = torch.linalg.vector_norm(places[:, None] - places, dim=-1) * patch_size
    return distances
