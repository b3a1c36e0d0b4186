"""A detector: a ViT, the simple feature pyramid behind its last layer, and FCOS's head.

In: images, float [b, c, height, width], normalised by `preprocessing.normalise`. Out: `Outputs`, see
`vit_model.detection.fcos`.
Use: `detector = Detector(vit, classes)`; `detector.initialise(seed)`;
`loss(detector(images), detector.places, truths)`, or `detect(detector(images), detector.places, height, width)`.

The map has the patches' tokens behind the last layer norm, also of a model that norms after pooling; ViTDet's backbones
have none (Li et al. 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from vit_model.config import ViTConfig
from vit_model.detection.contract import SCALES, DetectorContract, check, read_detector_contract
from vit_model.detection.fcos import FCOSHead, Outputs, Places
from vit_model.detection.pyramid import SimpleFeaturePyramid
from vit_model.model import ViT
from vit_model.parts import AroundModel, as_map, generator_of
from vit_model.weights import finite_weights, load_tensors, write_contract, write_tensors


class Detector(AroundModel):
    """A ViT that detects objects of some classes.

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
        self._scales = tuple(scales)

    @cached_property
    def places(self) -> Places:
        """The places of the maps, on the device of the weights when they are first asked for."""
        rows, columns = self.config.grid
        shapes = [(int(rows * scale), int(columns * scale)) for scale in self._scales]
        strides = [self.config.patch_size / scale for scale in self._scales]
        return Places.of(shapes, strides, self.head.classes.weight.device)

    @property
    def config(self) -> ViTConfig:
        """The ViT's configuration."""
        return self.model.config

    def is_head(self, name: str) -> bool:
        return not name.startswith(self.model_prefix)

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

    def forward(self, images: Tensor, drop_path_draws: Tensor | None = None) -> Outputs:
        """[b, c, height, width] -> what the head says about each place; `drop_path_draws`: see `ViT.forward`.

        Raises ValueError if the images' size is not the configuration's, or their dtype not the weights'.
        """
        return self.read(self.model.normed_tokens(images, drop_path_draws))

    def read(self, tokens: Tensor) -> Outputs:
        """The ViT's tokens [b, n, d] -> what the head says; for frozen features, which are computed once."""
        config = self.model.config
        outputs: Outputs = self.head(self.pyramid(as_map(tokens[:, config.num_prefix_tokens :], config.grid)))
        return outputs


def checked_detector(detector: Detector, contract: DetectorContract) -> dict[str, Tensor]:
    """Return the weights. Raises ValueError if the contract is another's, or a weight is NaN or infinite."""
    if contract.backbone.architecture != detector.config:
        raise ValueError(f"contract is for {contract.backbone.architecture!r}, the backbone is {detector.config!r}")
    return finite_weights(detector)


def save_detector(folder: Path, detector: Detector, contract: DetectorContract) -> None:
    """Write the detector's weights and contract to `folder`. Raises ValueError as `checked_detector`."""
    write_tensors(folder, checked_detector(detector, contract))
    write_contract(folder, contract)


def load_detector(folder: Path) -> tuple[Detector, DetectorContract]:
    """Load the detector in `folder`, float32 on the CPU in evaluation mode, and its contract.

    Raises UserError, naming the file, as `load_model` does.
    """
    contract = read_detector_contract(folder)
    architecture = contract.backbone.architecture
    assert isinstance(architecture, ViTConfig)  # the contract has checked it

    def make() -> Detector:
        names = contract.class_names
        return Detector(ViT(architecture), len(names), contract.channels, contract.convs, contract.scales)

    return load_tensors(folder, architecture, None, make).eval(), contract
