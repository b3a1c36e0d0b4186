"""Masked patch prediction (sections 4.6 and B.1.2): say what half of an image's patches were, from the other half.

In: a ViT without a classifier, images as it takes them, their pixels and random numbers. Out: a loss.
Use: `task = MaskedPatches(model)`; `loss = task(images, pixels, draws)`; what was pretrained is `task.model`.

Letters in shapes: b batch, n patches, k corrupted patches, d width, c channels, p patch size.
The authors' code was never released. What the paper leaves open is decided here, each in its place.
"""

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_model.model import ViT
from vit_model.objectives import in_full

Target = Literal["mean_colour", "4x4", "pixels"]
"""What is predicted of a corrupted patch: its mean colour at 3 bits a channel, which the paper uses; the same of a
4x4 downsized version; or all its pixels, by regression."""
LEVELS = 8  # of a channel: 3 bits
DRAWS = 2  # random numbers for each patch


class Counts(NamedTuple):
    """How many patches of each image are corrupted, and how; always so many, not so many on average."""

    masked: int
    replaced: int
    unchanged: int

    @property
    def corrupted(self) -> int:
        return sum(self)


def counts(num_patches: int) -> Counts:
    """Half of the patches, rounded down. Of those a tenth each is replaced and left unchanged, rounded to the
    nearest whole number, halves up; the rest, about 80 %, is masked. Of 196 patches: 78, 10 and 10.

    Raises ValueError when there is nothing to predict from.
    """
    if num_patches < 2:
        raise ValueError(f"masked patch prediction needs two patches or more; the model has {num_patches}")
    corrupted = num_patches // 2
    tenth = (corrupted + 5) // 10
    return Counts(corrupted - 2 * tenth, tenth, tenth)


class Corruption(NamedTuple):
    """What happens to a batch of images."""

    masked: Tensor
    """bool [b, n]: the patch becomes the mask vector."""
    source: Tensor
    """int64 [b, n]: the patch whose embedding is taken; its own, but where the patch is replaced."""
    predicted: Tensor
    """int64 [b, k]: the corrupted patches, the unchanged ones among them."""


def corruption(draws: Tensor) -> Corruption:
    """From float64 draws [b, n, 2] in [0, 1), independent of one another, which patches are corrupted and how.

    The first numbers order an image's patches; the first of that order are masked, the next replaced, the next left
    unchanged. The second numbers say by which patch of the same image: any other one, equally likely.
    A sample's draws decide alone, so it does not matter in which batch or process it is.
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
    """Patch embeddings [b, n, d] with some of them exchanged; `mask` [1, 1, d] is the mask vector.

    A replaced patch gets another one's embedding as it was before, even where that one is masked.
    """
    taken = patches.gather(1, plan.source[:, :, None].expand_as(patches))
    return torch.where(plan.masked[:, :, None], mask.to(patches.dtype), taken)


def targets(pixels: Tensor, patch_size: int, target: Target) -> Tensor:
    """What is to be predicted of every patch of uint8 images [b, height, width, c], in raster order.

    "mean_colour": int64 [b, n, 1] from 0 to 8^c - 1. The mean over the patch is taken first, exactly, and cut down
    to its 3 highest bits then; the first channel counts most.
    "4x4": the same of 4 x 4 blocks in raster order, [b, n, 16]; where 4 does not divide the patch size, neighbouring
    blocks share a row or column of pixels.
    "pixels": float32 [b, n, p * p * c] in (row, column, channel) order, from -1 to 1 whatever the model's
    normalisation is.
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


class MaskedPatches(nn.Module):
    """A ViT with what the task adds to it: the mask vector and one linear layer on the tokens of corrupted patches.

    Both start from zero, as the class token and a classifier do, so the first cross-entropy is log(8^c).
    Raises ValueError for a ViT that has parts which the task would not train, or a single patch.
    """

    def __init__(self, model: ViT, target: Target = "mean_colour") -> None:
        super().__init__()
        config = model.config
        if target not in get_args(Target):
            raise ValueError(f"target {target!r} is none of {', '.join(get_args(Target))}")
        if config.num_classes or config.representation_head or config.pooling == "map":
            raise ValueError(
                "masked patch prediction reads the patches' tokens, and would leave these untrained: num_classes "
                f"{config.num_classes}, representation_head {config.representation_head}, pooling {config.pooling!r};"
                " 0, False and 'cls' or 'gap' fit"
            )
        counts(config.num_patches)  # raises where there are too few
        self.model, self.target = model, target
        like = model.patch_embed.proj.weight
        self.mask_token = nn.Parameter(like.new_zeros(1, 1, config.width))
        self.classes = LEVELS**config.in_channels
        outputs = {
            "mean_colour": self.classes,
            "4x4": 16 * self.classes,
            "pixels": config.patch_size**2 * config.in_channels,
        }[target]
        with torch.device("meta"):  # torch's own initialisation would move the global generator
            self.head = nn.Linear(config.width, outputs, dtype=like.dtype)
        self.head.to_empty(device=like.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, pixels: Tensor, draws: Tensor) -> Tensor:
        """The loss, a scalar in float32, of images [b, c, height, width] as the model takes them.

        `pixels` are the same images before normalisation, uint8 [b, height, width, c]; `draws` are float64
        [b, n, 2] from 0 up to 1 (see `corruption`). The mean over images and corrupted patches, and over a patch's
        16 classes or over its pixels: cross-entropy, or squared error.
        Raises ValueError for images, pixels or draws of another shape or dtype.
        """
        config = self.model.config
        channels, sides, n = config.in_channels, config.image_shape, config.num_patches
        b = len(images)
        for name, given, shape, dtype in (
            ("images", images, [b, channels, *sides], images.dtype),
            ("pixels", pixels, [b, *sides, channels], torch.uint8),
            ("draws", draws, [b, n, DRAWS], torch.float64),
        ):
            if (list(given.shape), given.dtype) != (shape, dtype):
                raise ValueError(
                    f"{name} are {given.dtype} {list(given.shape)}; this model needs {dtype} {shape}"
                )
        plan = corruption(draws)
        tokens = self._tokens(corrupt(self.model.patch_embed(images), self.mask_token, plan))
        tokens = tokens.gather(1, plan.predicted[:, :, None].expand(-1, -1, config.width))
        expected = targets(pixels, config.patch_size, self.target)
        expected = expected.gather(1, plan.predicted[:, :, None].expand(-1, -1, expected.shape[2]))
        predicted = in_full(self.head(tokens))  # [b, k, outputs]
        if self.target == "pixels":
            return F.mse_loss(predicted, expected.to(predicted.dtype))
        return F.cross_entropy(predicted.view(-1, self.classes), expected.flatten())

    def _tokens(self, patches: Tensor) -> Tensor:
        """Patch embeddings [b, n, d] -> the encoder's normed tokens of the patches [b, n, d]; positions come after."""
        tokens = self.model.encode(self.model.assemble(patches))
        if self.model.config.norm_after_pooling:
            tokens = self.model.fc_norm(tokens)
        return tokens[:, self.model.config.num_prefix_tokens :]
