"""Objective mae: a masked autoencoder, whose decoder is thrown away after training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.spec import Pretrain
from ray_jobs.augment import uniform
from ray_jobs.training.methods.base import Method
from vit_model import compute
from vit_model.blocks import is_fused
from vit_model.build import Network
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.objectives.masked_autoencoder import MaskedAutoencoder
from vit_model.parts import ParameterGroups


class Autoencoder(Method):
    """Reconstructs the pixels of masked patches."""

    def __init__(self, config: Pretrain, contract: ModelContract, device: torch.device) -> None:
        super().__init__(config, contract, device)
        self.added_parameters = compute.decoder_parameters(self.vit, config.mae)

    def module(self, model: Network) -> ParameterGroups:
        assert isinstance(model, ViT)
        return MaskedAutoencoder(model, self.config.mae, seed=self.config.seed)

    def loss(
        self,
        engine: Callable[..., Any],
        views: tuple[Tensor, ...],
        targets: Tensor,
        positions: NDArray[np.int64],
    ) -> Tensor:
        (images,) = views
        drawn = uniform(self.config.seed, positions, self.vit.num_patches, "masked autoencoder")
        draws = torch.from_numpy(drawn).to(self.device)
        loss: Tensor = engine(self.inputs(images), images, draws, *self.drop_path_draws(positions))
        return loss

    @property
    def forward_flops(self) -> int:
        return compute.forward_flops(self.vit, self.config.mae)

    @property
    def train_flops(self) -> int:
        return compute.train_flops(self.vit, self.config.mae)

    def activation_bytes(self, images: int) -> int:
        sequences = compute.seen_tokens(self.vit, self.config.mae), self.vit.num_tokens
        encoder_is_fused, decoder_is_fused = (
            is_fused(self.device, self.dtype, tokens) for tokens in sequences
        )
        return compute.autoencoder_activation_bytes(
            self.vit,
            self.config.mae,
            images,
            value_bytes=self.dtype.itemsize,
            fused_attention=(encoder_is_fused, decoder_is_fused),
            checkpointing=self.config.activation_checkpointing,
        )
