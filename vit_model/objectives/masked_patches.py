"""Masked patch prediction (sections 4.6 and B.1.2): predict half of an image's patches from the other half.

In: a ViT without a classifier, images as it takes them, their pixels and random numbers. Out: a loss.
Use: `task = MaskedPatches(model)`; `loss = task(images, pixels, draws)`; the pretrained model is `task.model`.

Letters in shapes: b batch, n patches, k corrupted patches, d width, c channels, p patch size.
The authors' code was never released. Docstrings below note the choices that the paper leaves open.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_model.config import ViTConfig
from vit_model.model import ViT
from vit_model.objectives.losses import in_full
from vit_model.parts import AroundModel

Target = Literal["mean_colour", "4x4", "pixels"]
"""The target for a corrupted patch: its mean colour at 3 bits per channel, which the paper uses; the colours of a 4x4
downsized version; or all its pixels, by regression."""
LEVELS = 8  # levels per channel: 3 bits
DRAWS = 2  # random numbers per patch


def outputs(config: ViTConfig, target: Target) -> int:
    """Return how many numbers are predicted for a patch."""
    classes: int = LEVELS**config.in_channels
    sizes = {"mean_colour": classes, "4x4": 16 * classes, "pixels": config.patch_size**2 * config.in_channels}
    return sizes[target]


class Counts(NamedTuple):
    """The exact numbers of patches of each image that are corrupted in each way."""

    masked: int
    replaced: int
    unchanged: int

    @property
    def corrupted(self) -> int:
        return sum(self)


def counts(num_patches: int) -> Counts:
    """Return how many patches to mask, replace and leave unchanged.

    Half of the patches, rounded down, are corrupted. A tenth of these is replaced and a tenth left unchanged (rounded
    to the nearest whole number, halves up); the rest, about 80%, is masked. For 196 patches: 78, 10 and 10.

    Raises ValueError for fewer than two patches.
    """
    if num_patches < 2:
        raise ValueError(f"masked patch prediction needs at least two patches; the model has {num_patches}")
    corrupted = num_patches // 2
    tenth = (corrupted + 5) // 10
    return Counts(corrupted - 2 * tenth, tenth, tenth)


class Corruption(NamedTuple):
    """The corruption of a batch of images."""

    masked: Tensor
    """bool [b, n]: the patch becomes the mask vector."""
    source: Tensor
    """int64 [b, n]: the patch that the embedding comes from; another one only for a replaced patch."""
    predicted: Tensor
    """int64 [b, k]: the corrupted patches, including the unchanged ones."""


def corruption(draws: Tensor) -> Corruption:
    """Decide which patches are corrupted and how, from independent float64 draws [b, n, 2] in [0, 1).

    The first numbers order an image's patches: the first patches in that order are masked, the next replaced, the next
    left unchanged. The second numbers choose the replacement among the other patches of the same image, all equally
    likely. The result depends only on a sample's own draws, not on its batch or process.
    """
    b, n, _ = draws.shape
    masked, replaced, unchanged = counts(n)
    order = draws[:, :, 0].argsort(dim=1, stable=True)
    is_masked = torch.zeros(b, n, dtype=torch.bool, device=draws.device)
    is_masked.scatter_(1, order[:, :masked], True)
    itself = torch.arange(n, device=draws.device).expand(b, n)
    other = (draws[:, :, 1] * (n - 1)).long()
    other = other + (other >= itself)  # all but itself
    chosen = order[:, masked : masked + replaced]
    source = itself.scatter(1, chosen, other.gather(1, chosen))
    return Corruption(is_masked, source, order[:, : masked + replaced + unchanged])


def corrupt(patches: Tensor, mask: Tensor, plan: Corruption) -> Tensor:
    """Apply the corruption to patch embeddings [b, n, d]; `mask` [1, 1, d] is the mask vector.

    A replaced patch gets another patch's original embedding, even if that patch is masked.
    """
    taken = patches.gather(1, plan.source[:, :, None].expand_as(patches))
    return torch.where(plan.masked[:, :, None], mask.to(patches.dtype), taken)


def targets(pixels: Tensor, patch_size: int, target: Target) -> Tensor:
    """Return the prediction targets of every patch of uint8 images [b, height, width, c], in raster order.

    "mean_colour": int64 [b, n, 1] from 0 to 8^c - 1. The exact mean over the patch is truncated to its 3 highest bits;
    the first channel is the most significant digit.
    "4x4": the same for 4 x 4 blocks in raster order, [b, n, 16]. If 4 does not divide the patch size, neighbouring
    blocks share a row or column of pixels.
    "pixels": float32 [b, n, p * p * c] in (row, column, channel) order, from -1 to 1, independent of the model's
    normalisation.
    """
    b, height, width, c = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    side = {"mean_colour": 1, "4x4": 4, "pixels": patch_size}[target]
    image = pixels.permute(0, 3, 1, 2).float()
    if side != patch_size:
        image = F.adaptive_avg_pool2d(image, (rows * side, columns * side))
    blocks = image.reshape(b, c, rows, side, columns, side).permute(0, 2, 4, 3, 5, 1)
    blocks = blocks.reshape(b, rows * columns, side * side, c)
    if target == "pixels":
        return (blocks / 127.5 - 1).flatten(2)
    weights = LEVELS ** torch.arange(c - 1, -1, -1, device=pixels.device)
    return ((blocks // (256 // LEVELS)).long() * weights).sum(dim=-1)


class MaskedPatches(AroundModel):
    """A ViT with the task's own parts: the mask vector and one linear layer on the tokens of corrupted patches.

    Both start from zero, as the class token and a classifier do, so the first cross-entropy is log(8^c).
    Raises ValueError for a ViT with parts that the task would not train, unless another one does (`beside_labels`), or
    with a single patch.
    """

    def __init__(self, model: ViT, target: Target = "mean_colour", beside_labels: bool = False) -> None:
        super().__init__()
        config = model.config
        has_head = bool(config.num_classes or config.representation_head or config.pooling == "map")
        if has_head and not beside_labels:
            raise ValueError(
                f"masked patch prediction trains no head: num_classes is {config.num_classes}, representation_head "
                f"{config.representation_head}, pooling {config.pooling!r}; use 0, False, and 'cls' or 'gap'"
            )
        counts(config.num_patches)  # raises if there are too few
        self.model, self.target = model, target
        like = model.patch_embed.proj.weight
        self.mask_token = nn.Parameter(like.new_zeros(1, 1, config.width))
        self.classes = LEVELS**config.in_channels
        with torch.device("meta"):  # torch's own initialisation would advance the global generator
            self.head = nn.Linear(config.width, outputs(config, target), dtype=like.dtype)
        self.head.to_empty(device=like.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, pixels: Tensor, draws: Tensor, drop_path_draws: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar in float32, of images [b, c, height, width] as the model takes them.

        The loss is the cross-entropy, or the squared error for pixels, averaged over images, corrupted patches and the
        targets of a patch.

        Args:
            pixels: the same images before normalisation, uint8 [b, height, width, c].
            draws: float64 [b, n, 2] in [0, 1), see `corruption`.
            drop_path_draws: [b, blocks, 2], see `ViT.drop_path_factors`.
        """
        config = self.model.config
        plan = corruption(draws)
        patches = corrupt(self.model.patch_embed(images), self.mask_token, plan)
        tokens = self._tokens(patches, drop_path_draws)
        tokens = tokens.gather(1, plan.predicted[:, :, None].expand(-1, -1, config.width))
        expected = targets(pixels, config.patch_size, self.target)
        expected = expected.gather(1, plan.predicted[:, :, None].expand(-1, -1, expected.shape[2]))
        predicted = in_full(self.head(tokens))  # [b, k, outputs]
        if self.target == "pixels":
            return F.mse_loss(predicted, expected.to(predicted.dtype))
        return F.cross_entropy(predicted.view(-1, self.classes), expected.flatten())

    def _tokens(self, patches: Tensor, drop_path_draws: Tensor | None) -> Tensor:
        """Encode patch embeddings [b, n, d] without positions; return the patches' normed tokens [b, n, d]."""
        tokens = self.model.encode(self.model.assemble(patches), drop_path_draws=drop_path_draws)
        if self.model.config.norm_after_pooling:
            tokens = self.model.fc_norm(tokens)
        return tokens[:, self.model.config.num_prefix_tokens :]


class PatchesBesideLabels(AroundModel):
    """A classifier that also predicts masked patches, as an auxiliary task. `patches.model` is the ViT.

    The two tasks see the image in two passes: the classifier whole, the auxiliary task with corrupted patches. One pass
    for both would train the classifier on corrupted images only.
    """

    model_prefix = "patches.model."

    def __init__(self, model: ViT, target: Target = "mean_colour") -> None:
        super().__init__()
        self.patches = MaskedPatches(model, target, beside_labels=True)

    def forward(
        self,
        images: Tensor,
        pixels: Tensor | None = None,
        draws: Tensor | None = None,
        drop_path_draws: Tensor | None = None,
        drop_path_draws_of_patches: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits [b, classes], and the loss of `MaskedPatches` if there are pixels and draws for it."""
        logits: Tensor = self.patches.model(images, drop_path_draws)
        if pixels is None:
            return logits
        return logits, self.patches(images, pixels, draws, drop_path_draws_of_patches)
