"""The sizes of a ResNet's stages, or of those of a hybrid's stem, which `vit_model.resnet` builds. Free of torch."""

from typing import NamedTuple


class BottleneckStage(NamedTuple):
    """A sequence of bottlenecks with three convolutions each (1x1, 3x3, 1x1), and a 1x1 shortcut around the first."""

    units: int
    in_channels: int
    middle: int
    """Channels of the 3x3 convolutions."""
    stride: int
    """Stride of the first unit: of its 3x3 convolution and of its shortcut."""

    @property
    def out_channels(self) -> int:
        return 4 * self.middle

    @property
    def kernel_parameters(self) -> int:
        """Parameters of all convolutions."""
        units, wide, middle, out = self.units, self.in_channels, self.middle, self.out_channels
        first = wide * middle + wide * out
        return first + (units - 1) * out * middle + units * (9 * middle * middle + middle * out)


def bottleneck_stages(units: tuple[int, ...], width_factor: int = 1) -> list[BottleneckStage]:
    """Return the stages of a ResNet or of a hybrid's stem, in order, after a root of 64 x `width_factor` channels."""
    stages, channels = [], 64 * width_factor
    for index, count in enumerate(units):
        middle = 64 * width_factor * 2**index
        stages.append(BottleneckStage(count, channels, middle, stride=2 if index else 1))
        channels = 4 * middle
    return stages


def stem_channels(stem: tuple[int, ...]) -> int:
    """Return the channels of the convolutional stem's output: 64 after the root, and 256 x 2^k after stage k."""
    return 64 if not stem else 256 * 2 ** (len(stem) - 1)


def stem_stride(stem: tuple[int, ...]) -> int:
    """Return the pixels between neighbours of the convolutional stem's output."""
    return 2 << max(1, len(stem))


def stem_parameters(stem: tuple[int, ...], in_channels: int) -> int:
    """Return the parameters of a hybrid's convolutional stem (`vit_model.resnet.Stem`), group norms included."""
    total = 7 * 7 * in_channels * 64 + 2 * 64
    for stage in bottleneck_stages(stem):
        norms = stage.units * (2 * stage.middle + stage.out_channels) + stage.out_channels
        total += stage.kernel_parameters + 2 * norms
    return total
