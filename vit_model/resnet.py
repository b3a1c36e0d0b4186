"""The convolutional networks of the paper: its baseline (section 4.1) and the stem of its hybrids (section 3.1).

In: a `ResNetConfig` and images, float [b, c, height, width], normalised by `preprocessing.normalise`.
Out: logits [b, classes], or the feature map and the representation.
Use: `model = ResNet(config)`; `model.initialise(seed)`; `logits = model(images)`.

Both have bottlenecks, group norm and standardised kernels. The baseline, from BiT (big_transfer,
bit_pytorch/models.py), norms before each convolution and pads by a fixed amount. The stem (vision_transformer,
models_resnet.py) norms after each convolution and pads as TensorFlow's SAME.

Letters in shapes: b batch, c channels, n positions of a feature map, d its channels. The parameters have timm's names.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_model.config import ResNetConfig
from vit_model.parts import ParameterGroups, check_images, lecun_normal_
from vit_model.variants import BottleneckStage, bottleneck_stages

GROUPS = 32


class StdConv2d(nn.Conv2d):
    """A convolution without bias; its kernels have mean 0 and variance 1 over (input channels, height, width).

    Qiao et al. 2019; (w - mean) / sqrt(variance + 1e-10) as in BiT. Padded with kernel // 2 zeros on each side.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, c in, height, width] -> [b, c out, ceil(height / stride), ceil(width / stride)]."""
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) / torch.sqrt(variance + 1e-10)
        return F.conv2d(x, weight, stride=self.stride, padding=self.padding)


class PreActUnit(nn.Module):
    """A bottleneck in the order of ResNet v2: norm and ReLU before each convolution, nothing after the sum.

    The 3x3 convolution has the stride.
    """

    def __init__(self, in_channels: int, middle: int, stride: int, shortcut: bool) -> None:
        super().__init__()
        out = 4 * middle
        self.norm1 = nn.GroupNorm(GROUPS, in_channels, eps=1e-5)
        self.conv1 = StdConv2d(in_channels, middle, 1)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, middle, eps=1e-5), StdConv2d(middle, middle, 3, stride)
        self.norm3, self.conv3 = nn.GroupNorm(GROUPS, middle, eps=1e-5), StdConv2d(middle, out, 1)
        self.downsample: nn.ModuleDict | None = None
        if shortcut:
            self.downsample = nn.ModuleDict({"conv": StdConv2d(in_channels, out, 1, stride)})

    def forward(self, x: Tensor) -> Tensor:
        """[b, c in, height, width] -> [b, 4 * middle, ceil(height / stride), ceil(width / stride)]."""
        normed = F.relu(self.norm1(x))
        shortcut = x if self.downsample is None else self.downsample["conv"](normed)
        inner = self.conv1(normed)
        inner = self.conv2(F.relu(self.norm2(inner)))
        out: Tensor = shortcut + self.conv3(F.relu(self.norm3(inner)))
        return out


class ResNet(ParameterGroups):
    """The baseline and its head. Built on torch's default device with the weights of `initialise(seed=0)`."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        # On "meta" first, because torch's own initialisation would be wasted and would advance the global generator.
        with torch.device("meta"):
            root = StdConv2d(config.in_channels, 64 * config.width_factor, 7, 2)
            self.stem = nn.ModuleDict({"conv": root})
            self.stages = _stages(PreActUnit, config.stages)
            self.norm = nn.GroupNorm(GROUPS, config.width, eps=1e-5)
            if config.num_classes:
                self.head = nn.Linear(config.width, config.num_classes)
        self.to_empty(device=device)
        if device.type != "meta":
            self.initialise(seed=0)

    def forward(self, images: Tensor) -> Tensor:
        """[b, c, height, width] -> logits [b, classes], or the representation [b, d] without a head.

        Raises ValueError if the images' size is not the configuration's, or their dtype not the weights'.
        """
        representation = self.forward_features(images)[1]
        if not self.config.num_classes:
            return representation
        logits: Tensor = self.head(representation)
        return logits

    def forward_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[b, c, height, width] -> the last feature map [b, n, d] in raster order, normed; its mean [b, d].

        Raises ValueError if the images' size is not the configuration's, or their dtype not the weights'.
        """
        check_images(images, self.config, self.norm.weight.dtype)
        x = self.stem["conv"](images)
        # Pad with zeros, which may be the maximum because there is no ReLU before; bit_pytorch notes that this is
        # "subtly not the same" as max_pool2d's own padding with -inf. big_vision (bit_paper.py) pads with -inf for the
        # same files.
        x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, stride=2)
        x = F.relu(self.norm(_run(self.stages, x)))
        features = x.flatten(2).transpose(1, 2)  # [b, n, d]
        return features, features.mean(dim=1)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Initialise all weights as the authors' JAX code does (big_vision, models/bit_paper.py).

        | parameter    | distribution                                    |
        |--------------|-------------------------------------------------|
        | convolutions | LeCun normal: variance 1 / fan-in, cut at 2 std |
        | group norms  | weight 1, bias 0                                |
        | head         | weight 0, bias `head_bias`                      |

        Weights are drawn on the CPU in float32, so a seed gives the same weights on every device.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            drawn = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            if drawn.ndim == 4:
                lecun_normal_(drawn, generator)
            elif "norm" in name and name.endswith(".weight"):
                drawn.fill_(1.0)
            elif name == "head.bias":
                drawn.fill_(self.config.head_bias)
            parameter.copy_(drawn)


# ------------------------------------------------------------------------------------------ the stem of hybrids


def same_pad(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad [b, c, height, width] as TensorFlow's SAME: to ceil(side / stride) outputs, an odd pixel at the end."""
    amounts = []
    for side in (x.shape[-1], x.shape[-2]):
        total = max(0, (-(-side // stride) - 1) * stride + kernel - side)
        amounts += [total // 2, total - total // 2]
    return F.pad(x, amounts, value=value) if any(amounts) else x


class StdConv2dSame(nn.Conv2d):
    """A `StdConv2d` with (w - mean) / (std + 1e-5) and SAME padding."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, c in, height, width] -> [b, c out, ceil(height / stride), ceil(width / stride)]."""
        std, mean = torch.std_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) / (std + 1e-5)
        return F.conv2d(same_pad(x, self.kernel_size[0], self.stride[0]), weight, stride=self.stride)


class StemUnit(nn.Module):
    """A bottleneck in the order of ResNet v1: norm after each convolution, ReLU after the sum."""

    def __init__(self, in_channels: int, middle: int, stride: int, shortcut: bool) -> None:
        super().__init__()
        out = 4 * middle
        self.conv1, self.norm1 = StdConv2dSame(in_channels, middle, 1), nn.GroupNorm(GROUPS, middle, eps=1e-6)
        self.conv2 = StdConv2dSame(middle, middle, 3, stride)
        self.norm2 = nn.GroupNorm(GROUPS, middle, eps=1e-6)
        self.conv3, self.norm3 = StdConv2dSame(middle, out, 1), nn.GroupNorm(GROUPS, out, eps=1e-6)
        self.downsample: nn.ModuleDict | None = None
        if shortcut:
            conv, norm = StdConv2dSame(in_channels, out, 1, stride), nn.GroupNorm(GROUPS, out, eps=1e-6)
            self.downsample = nn.ModuleDict({"conv": conv, "norm": norm})

    def forward(self, x: Tensor) -> Tensor:
        """[b, c in, height, width] -> [b, 4 * middle, ceil(height / stride), ceil(width / stride)]."""
        inner = F.relu(self.norm1(self.conv1(x)))
        inner = F.relu(self.norm2(self.conv2(inner)))
        inner = self.norm3(self.conv3(inner))
        if self.downsample is not None:
            x = self.downsample["norm"](self.downsample["conv"](x))
        return F.relu(x + inner)


class Stem(nn.Module):
    """The convolutional stem of a hybrid: 7x7 convolution, pooling, and `units[k]` bottlenecks in stage k."""

    def __init__(self, units: tuple[int, ...], in_channels: int) -> None:
        super().__init__()
        self.stem = nn.ModuleDict(
            {"conv": StdConv2dSame(in_channels, 64, 7, 2), "norm": nn.GroupNorm(GROUPS, 64, eps=1e-6)}
        )
        self.stages = _stages(StemUnit, bottleneck_stages(units))

    def forward(self, images: Tensor) -> Tensor:
        """[b, c, height, width] -> [b, channels, height / stride, width / stride], sides rounded up."""
        x = F.relu(self.stem["norm"](self.stem["conv"](images)))
        x = F.max_pool2d(same_pad(x, 3, 2, value=float("-inf")), 3, stride=2)
        return _run(self.stages, x)


def _stages(unit: type[PreActUnit] | type[StemUnit], stages: list[BottleneckStage]) -> nn.ModuleList:
    """Build the units of each stage; the first changes the channels, so it has a convolution on its shortcut."""
    built = nn.ModuleList()
    for count, in_channels, middle, stride in stages:
        units = [unit(in_channels, middle, stride, shortcut=True)]
        units += [unit(4 * middle, middle, 1, shortcut=False) for _ in range(count - 1)]
        built.append(nn.ModuleDict({"blocks": nn.ModuleList(units)}))
    return built


def _run(stages: nn.ModuleList, x: Tensor) -> Tensor:
    for stage in stages:
        for block in stage["blocks"]:  # type: ignore[index]
            x = block(x)
    return x
