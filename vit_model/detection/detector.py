"""A detector: a ViT, the simple feature pyramid behind its last layer, and FCOS's head.

In: images, float [b, c, height, width], normalised by `preprocessing.normalise`. Out: `Outputs`, see
`vit_model.detection.fcos`.
Use: `detector = Detector(vit, classes)`; `detector.initialise(seed)`;
`loss(detector(images), detector.places, truths)`, or `detect(detector(images), detector.places, height, width)`.

The map has the patches' tokens behind the last layer norm, if the model has one before pooling; ViTDet's backbones have
none (Li et al. 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vit_model.config import ViTConfig
from vit_model.detection.fcos import GROUPS, FCOSHead, Outputs, Places
from vit_model.detection.pyramid import SCALES, SimpleFeaturePyramid, as_map
from vit_model.model import ViT
from vit_model.parts import AroundModel, generator_of


class Detector(AroundModel):
    """A ViT that detects objects of some classes; its own classifier, if it has one, is not used.

    Raises ValueError for a hybrid, whose stem has maps of its own, and for channels or a grid that cannot be divided.
    """

    def __init__(
        self, model: ViT, num_classes: int, channels: int = 256, convs: int = 4, scales: Sequence[float] = SCALES
    ) -> None:
        super().__init__()
        check(model.config, channels, scales)
        self.model = model
        self.pyramid = SimpleFeaturePyramid(model.config.width, channels, scales)
        self.head = FCOSHead(channels, num_classes, convs)
        rows, columns = model.config.grid
        shapes = [(int(rows * scale), int(columns * scale)) for scale in scales]
        self.places = Places.of(shapes, [model.config.patch_size / scale for scale in scales])

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the pyramid, as torch does, and the head; the ViT stays as it is."""
        generator = generator_of("detector", seed)
        for module in self.pyramid.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_uniform_(module.weight, a=5**0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        self.head.initialise(generator)

    def forward(self, images: Tensor) -> Outputs:
        """[b, c, height, width] -> what the head says about each place.

        Raises ValueError if the images' size is not the configuration's, or their dtype not the weights'.
        """
        return self.read(self.model.encode(self.model.embed(images)))

    def read(self, tokens: Tensor) -> Outputs:
        """The encoder's tokens [b, n, d] -> what the head says; for frozen features, which are computed once."""
        config = self.model.config
        outputs: Outputs = self.head(self.pyramid(as_map(tokens[:, config.num_prefix_tokens :], config.grid)))
        return outputs


def check(config: ViTConfig, channels: int, scales: Sequence[float]) -> None:
    """Raise ValueError for a model that has no such detector, see `Detector`."""
    if config.stem is not None:
        raise ValueError(f"a hybrid, with stem {list(config.stem)}, cannot be a detector's backbone; use a plain ViT")
    if channels % GROUPS:
        raise ValueError(f"channels {channels} is not a multiple of {GROUPS}, the groups of the head's norms")
    if 4 in scales and config.width % 4:
        raise ValueError(f"width {config.width} is not a multiple of 4, which the finest map needs")
    if 0.5 in scales and any(side % 2 for side in config.grid):
        raise ValueError(f"{config.grid[0]} x {config.grid[1]} patches cannot be halved; use an even number")
