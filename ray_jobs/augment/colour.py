"""Changes of colour and sharpness as Pillow computes them, with one strength for all images or one per image.

In and out: uint8 tensors [n, h, w, c], on any device. Results are the same on all devices, because they use integers or
single float32 operations. `factor` is a number, or one per image [n]; 1 leaves an image unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Factor = float | Tensor
Draws = NDArray[np.float64]
Chosen = NDArray[np.bool_]
JITTER_DRAWS = 9


def blend(plain: Tensor, images: Tensor, factor: Factor) -> Tensor:
    """Interpolate from `plain` (factor 0) to `images` (1) and beyond, clipped to 0..255 and rounded down."""
    if isinstance(factor, Tensor):
        factor = factor.to(images.device, torch.float32)[:, None, None, None]
    start = plain.float()
    return (start + (images.float() - start) * factor).clamp_(0, 255).to(torch.uint8)


def grey(images: Tensor) -> Tensor:
    """Return ITU-R 601 luma [n, h, w, 1] in Pillow's integer arithmetic; grey images are returned unchanged."""
    if images.shape[3] == 1:
        return images
    red, green, blue = images.int().unbind(3)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).to(torch.uint8)[..., None]


def brightness(images: Tensor, factor: Factor) -> Tensor:
    """Change the brightness; 0 is black."""
    return blend(torch.zeros_like(images), images, factor)


def saturation(images: Tensor, factor: Factor) -> Tensor:
    """Change the saturation (RandAugment's Color); 0 is grey."""
    return blend(grey(images), images, factor)


def contrast(images: Tensor, factor: Factor) -> Tensor:
    """Change the contrast; 0 is the image's mean grey everywhere, rounded."""
    lumas = grey(images).flatten(1).long()
    pixels = lumas.shape[1]
    mean = (2 * lumas.sum(dim=1) + pixels) // (2 * pixels)
    return blend(mean[:, None, None, None], images, factor)


def sharpness(images: Tensor, factor: Factor) -> Tensor:
    """Change the sharpness; 0 is smoothed by [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13, except for the border's pixels."""
    numbers = images.short()
    rows = numbers[:, :-2] + numbers[:, 1:-1] + numbers[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * numbers[:, 1:-1, 1:-1]
    smooth = images.clone()
    smooth[:, 1:-1, 1:-1] = ((total + 6).float() / 13).to(torch.uint8)
    return blend(smooth, images, factor)


def hue(images: Tensor, turn: Factor) -> Tensor:
    """Rotate hues by this fraction of the circle; 0 leaves them unchanged. Value and saturation are preserved (HSV)."""
    if images.shape[3] == 1:
        return images
    if isinstance(turn, Tensor):
        turn = turn.to(images.device, torch.float32)[:, None, None]
    numbers = images.float()
    red, green, blue = numbers.unbind(3)
    highest, lowest = numbers.amax(3), numbers.amin(3)
    spread = highest - lowest
    divisor = torch.where(spread > 0, spread, torch.ones_like(spread))
    sixth = torch.where(
        highest == red,
        (green - blue) / divisor,
        torch.where(highest == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    turned = sixth + 6 * turn
    # A channel is the highest in its third of the circle, falls to the lowest over a sixth, and rises again.
    channels = [highest - spread * _distance(turned, corner).sub(1).clamp(0, 1) for corner in (0, 2, 4)]
    return torch.stack(channels, dim=3).round().clamp(0, 255).to(torch.uint8)


def _distance(sixths: Tensor, corner: float) -> Tensor:
    """Return the distance on a circle of circumference 6: 0 to 3."""
    return ((sixths - corner + 3) % 6 - 3).abs()


def invert(images: Tensor) -> Tensor:
    """Invert all values."""
    return 255 - images


def solarize(images: Tensor, threshold: int) -> Tensor:
    """Invert values of at least `threshold`."""
    return images if threshold > 255 else torch.where(images < threshold, images, 255 - images)


def solarize_add(images: Tensor, addition: int) -> Tensor:
    """Add to values below 128."""
    added = (images.int() + addition).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, added, images)


def posterize(images: Tensor, bits: int) -> Tensor:
    """Keep the highest bits, at least one."""
    return images & (256 - 2 ** (8 - min(max(bits, 1), 8)))


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel of an image to 0..255."""
    low, high = images.amin((1, 2), keepdim=True).float(), images.amax((1, 2), keepdim=True).float()
    stretched = (images.float() - low) * 255 / (high - low).clamp(min=1)
    return torch.where(high > low, stretched.to(torch.uint8), images)


def equalize(images: Tensor) -> Tensor:
    """Make each channel's values about equally frequent."""
    n, height, width, c = images.shape
    planes = images.permute(0, 3, 1, 2).reshape(n * c, height * width).long()
    offsets = 256 * torch.arange(n * c, device=images.device)[:, None]
    histogram = torch.bincount((planes + offsets).flatten(), minlength=n * c * 256).view(n * c, 256)
    highest_count = histogram.gather(1, planes.amax(1, keepdim=True))
    step = (height * width - highest_count) // 255
    table = ((histogram.cumsum(1) - histogram + step // 2) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device)).to(torch.uint8)
    return table.gather(1, planes).view(n, c, height, width).permute(0, 2, 3, 1).contiguous()


def gaussian_blur(images: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Blur by a Gaussian of `sigma` [n] pixels, truncated at `radius`; the border's pixels are repeated outside."""
    n, height, width, c = images.shape
    offsets = torch.arange(-radius, radius + 1, device=images.device)
    weights = torch.exp(-0.5 * (offsets / sigma.to(images.device, torch.float32)[:, None]) ** 2)
    weights = (weights / weights.sum(1, keepdim=True)).repeat_interleave(c, 0)  # [n * c, 2 * radius + 1]
    planes = images.permute(0, 3, 1, 2).reshape(1, n * c, height, width).float()
    planes = functional.pad(planes, (radius,) * 4, mode="replicate")
    planes = functional.conv2d(planes, weights[:, None, None, :], groups=n * c)
    planes = functional.conv2d(planes, weights[:, None, :, None], groups=n * c)
    return planes.round().clamp(0, 255).to(torch.uint8).view(n, c, height, width).permute(0, 2, 3, 1)


def jitter(images: Tensor, draws: Draws, strengths: Mapping[str, float], probability: float = 1.0) -> Tensor:
    """Change brightness, contrast, saturation and hue of an image, with this probability, in random order.

    `strengths` are the largest changes: of a factor from 1; of the hue, a fraction of the circle. `draws` [n, 9] decide
    whether an image changes, the four amounts, and the order.
    """
    changes = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "hue": hue}
    order = np.argsort(draws[:, 5:9], axis=1, kind="stable")
    for turn in range(len(changes)):
        for number, (name, change) in enumerate(changes.items()):
            if name not in strengths:
                continue
            amounts = (2 * draws[:, 1 + number] - 1) * strengths[name] + (name != "hue")
            images = some(
                images,
                (draws[:, 0] < probability) & (order[:, turn] == number),
                lambda part, chosen, change=change, amounts=amounts: change(  # type: ignore[misc]
                    part, torch.from_numpy(amounts[chosen])
                ),
            )
    return images


def some(images: Tensor, chosen: Chosen, change: Callable[[Tensor, Chosen], Tensor]) -> Tensor:
    """Apply `change` to the images for which `chosen` [n] is true."""
    if not chosen.any():
        return images
    rows = torch.from_numpy(np.flatnonzero(chosen)).to(images.device)
    return images.index_copy(0, rows, change(images[rows], chosen))
