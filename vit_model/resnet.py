"""Convolutional networks beside the transformer: the stem of the hybrids (section 3.1).

Letters in shapes: b batch, c channels. Names of the parameters are timm's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_model.config import stem_channels

GROUPS = 32


def same_pad(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad [b, c, height, width] as TensorFlow's SAME does: to ceil(side / stride) outputs, the odd pixel behind."""
    amounts = []
    for side in (x.shape[-1], x.shape[-2]):
        total = max(0, (-(-side // stride) - 1) * stride + kernel - side)
        amounts += [total // 2, total - total // 2]
    return F.pad(x, amounts, value=value) if any(amounts) else x


class StdConv2d(nn.Conv2d):
    """A convolution without bias whose kernels have mean 0 and deviation 1 over (height, width, channels in).

    Qiao et al. 2019; (w - mean) / (std + 1e-5) as in the authors' models_resnet.py.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, c in, height, width] -> [b, c out, ceil(height / stride), ceil(width / stride)]."""
        std, mean = torch.std_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) / (std + 1e-5)
        return F.conv2d(same_pad(x, self.kernel_size[0], self.stride[0]), weight, stride=self.stride)


class StemUnit(nn.Module):
    """A bottleneck in the order of ResNet v1: norm behind each convolution, relu behind the sum."""

    def __init__(self, in_channels: int, middle: int, stride: int, shortcut: bool) -> None:
        super().__init__()
        out = 4 * middle
        self.conv1, self.norm1 = StdConv2d(in_channels, middle, 1), nn.GroupNorm(GROUPS, middle, eps=1e-6)
        self.conv2, self.norm2 = StdConv2d(middle, middle, 3, stride), nn.GroupNorm(GROUPS, middle, eps=1e-6)
        self.conv3, self.norm3 = StdConv2d(middle, out, 1), nn.GroupNorm(GROUPS, out, eps=1e-6)
        self.downsample: nn.ModuleDict | None = None
        if shortcut:
            conv, norm = StdConv2d(in_channels, out, 1, stride), nn.GroupNorm(GROUPS, out, eps=1e-6)
            self.downsample = nn.ModuleDict({"conv": conv, "norm": norm})

    def forward(self, x: Tensor) -> Tensor:
        """[b, c in, height, width] -> [b, 4 * middle, height / stride, width / stride]."""
        inner = F.relu(self.norm1(self.conv1(x)))
        inner = F.relu(self.norm2(self.conv2(inner)))
        inner = self.norm3(self.conv3(inner))
        if self.downsample is not None:
            x = self.downsample["norm"](self.downsample["conv"](x))
        return F.relu(x + inner)


class Stem(nn.Module):
    """What a hybrid's tokens are made of: 7x7 convolution, pooling, and `units[k]` bottlenecks in stage k."""

    def __init__(self, units: tuple[int, ...], in_channels: int) -> None:
        super().__init__()
        self.stem = nn.ModuleDict(
            {"conv": StdConv2d(in_channels, 64, 7, 2), "norm": nn.GroupNorm(GROUPS, 64, eps=1e-6)}
        )
        self.stages = nn.ModuleList()
        channels = 64
        for stage, count in enumerate(units):
            middle = 64 * 2**stage
            blocks = nn.ModuleList()
            for unit in range(count):
                blocks.append(
                    StemUnit(channels, middle, stride=2 if stage and not unit else 1, shortcut=not unit)
                )
                channels = 4 * middle
            self.stages.append(nn.ModuleDict({"blocks": blocks}))
        assert channels == stem_channels(units)

    def forward(self, images: Tensor) -> Tensor:
        """[b, c, height, width] -> [b, channels, height / stride, width / stride]."""
        x = F.relu(self.stem["norm"](self.stem["conv"](images)))
        x = F.max_pool2d(same_pad(x, 3, 2, value=float("-inf")), 3, stride=2)
        for stage in self.stages:
            for block in stage["blocks"]:  # type: ignore[index]
                x = block(x)
        return x
