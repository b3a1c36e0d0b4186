"""Masked autoencoders (He et al. 2022, arXiv 2111.06377): reconstruct most of an image's patches from the others.

In: a ViT without a classifier, images as it takes them, their pixels and random numbers. Out: a loss.
Use: `task = MaskedAutoencoder(model)`; `loss = task(images, pixels, draws)`; the pretrained model is `task.model`.

The encoder sees the visible patches only, a quarter by default; the narrow decoder sees all tokens. Details follow the
authors' code (facebookresearch/mae: models_mae.py). Like it, the module embeds all patches and keeps the visible ones.
Unlike it, the decoder gets its tokens in another order, which changes nothing because they carry their positions.

Letters in shapes: b batch, n patches, v visible patches, k masked patches (n - v), t prefix tokens (class token and
registers), d width of the encoder, w width of the decoder, c channels, p patch size.
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit_model.blocks import Block, sincos2d_moco
from vit_model.config import MaeOptions, ViTConfig
from vit_model.model import ViT
from vit_model.objectives.losses import in_full
from vit_model.objectives.masked_patches import targets
from vit_model.parts import AroundModel


def normalised(patches: Tensor) -> Tensor:
    """Subtract from each patch's values [..., p * p * c] their mean and divide by their deviation.

    As in the authors' code, the variance is the unbiased one (divided by p * p * c - 1) plus 1e-6.
    """
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + 1e-6).sqrt()


class Decoder(nn.Module):
    """From the encoder's tokens to the pixels of masked patches: a linear layer, blocks, a norm, a linear layer.

    Positions are fixed: the authors' table with its halves exchanged, which random weights do not notice.
    """

    def __init__(self, encoder: ViTConfig, options: MaeOptions) -> None:
        super().__init__()
        shape = options.decoder(encoder)
        self.grid, self.prefix = encoder.grid, encoder.num_prefix_tokens
        self.embed = nn.Linear(encoder.width, shape.width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width, eps=shape.layer_norm_eps)
        self.head = nn.Linear(shape.width, encoder.patch_size**2 * encoder.in_channels)

    def forward(self, tokens: Tensor, order: Tensor, recomputes: bool = False) -> Tensor:
        """Return the predicted pixels of the masked patches, [b, k, p * p * c].

        Args:
            tokens: [b, t + v, d], the encoder's.
            order: int64 [b, n], all patches: first the visible ones, as in `tokens`, then the masked ones.
            recomputes: whether blocks keep only their input for the backward pass.
        """
        x = self.embed(tokens)
        prefix, visible = x[:, : self.prefix], x[:, self.prefix :]
        table = sincos2d_moco(self.grid, x.shape[2], x.device)[0].to(x.dtype)  # [n, w]
        seen, hidden = order[:, : visible.shape[1]], order[:, visible.shape[1] :]
        x = torch.cat([self.mask_token + table[hidden], prefix, visible + table[seen]], dim=1)
        for layer in self.blocks:
            x = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
        predicted: Tensor = self.head(self.norm(x[:, : hidden.shape[1]]))
        return predicted

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Initialise the weights as the authors do, from random numbers of its own.

        Linear layers are drawn from a uniform distribution (Xavier; query, key and value as one matrix), the mask token
        from a normal one with std 0.02. Norms start from weight 1; biases are 0.
        """
        # the encoder is drawn from the seed itself
        digest = hashlib.sha256(f"decoder/{seed}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        for name, parameter in self.named_parameters():
            drawn = torch.zeros(parameter.shape, device="cpu")
            if name == "mask_token":
                drawn.normal_(std=0.02, generator=generator)
            elif name.endswith("weight") and drawn.ndim == 2:
                nn.init.xavier_uniform_(drawn, generator=generator)
            elif name.endswith("weight"):
                drawn.fill_(1)
            parameter.copy_(drawn)


class MaskedAutoencoder(AroundModel):
    """A ViT, its encoder, and the decoder; `options` are the authors' by default.

    Raises ValueError for a ViT that cannot be trained in this way (`MaeOptions.check`).
    """

    def __init__(self, model: ViT, options: MaeOptions | None = None, seed: int = 0) -> None:
        super().__init__()
        self.model, self.options = model, MaeOptions() if options is None else options
        self.options.check(model.config)
        with torch.device("meta"):  # torch's own initialisation would advance the global generator
            self.decoder = Decoder(model.config, self.options)
        self.decoder.to_empty(device=model.patch_embed.proj.weight.device)
        self.decoder.initialise(seed)

    def forward(self, images: Tensor, pixels: Tensor, draws: Tensor, drop_path_draws: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar in float32, of images [b, c, height, width] as the model takes them.

        It is the squared error of the masked patches' pixels from -1 to 1, or normalised, averaged over all of them.

        Args:
            pixels: the same images before normalisation, uint8 [b, height, width, c].
            draws: float64 [b, n] in [0, 1); the patches with the smallest numbers are visible.
            drop_path_draws: [b, blocks, 2], see `ViT.drop_path_factors`.
        """
        config = self.model.config
        order = draws.argsort(dim=1, stable=True)
        predicted = in_full(self.predict(images, order, drop_path_draws))
        expected = targets(pixels, config.patch_size, "pixels")
        masked = order[:, -predicted.shape[1] :]
        expected = expected.gather(1, masked[:, :, None].expand(-1, -1, expected.shape[2]))
        if self.options.normalise:
            expected = normalised(expected)
        return F.mse_loss(predicted, expected.to(predicted.dtype))

    def predict(self, images: Tensor, order: Tensor, drop_path_draws: Tensor | None = None) -> Tensor:
        """Return the predicted pixels of masked patches, [b, k, p * p * c]; the first v patches in `order` are visible.

        `order` is int64 [b, n].
        """
        model, config = self.model, self.model.config
        x = model.assemble(model.patch_embed(images))
        seen = order[:, : self.options.visible(config.num_patches)]
        prefix, patches = x[:, : config.num_prefix_tokens], x[:, config.num_prefix_tokens :]
        visible = patches.gather(1, seen[:, :, None].expand(-1, -1, config.width))
        tokens = model.encode(torch.cat([prefix, visible], dim=1), drop_path_draws=drop_path_draws)
        if config.norm_after_pooling:
            tokens = model.fc_norm(tokens)
        predicted: Tensor = self.decoder(tokens, order, model.activation_checkpointing)
        return predicted
