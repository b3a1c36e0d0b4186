"""Code shared by the model families and objectives: groups of weights for the optimizer, the input check, the
initialisation of layers.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from vit_model.config import ResNetConfig, ViTConfig

HEADS = ("pre_logits.", "head.", "head_dist.")


class ParameterGroups(nn.Module):
    """A module that groups its weights for the optimizer by their names (`named_parameters`)."""

    model_prefix = ""
    """the prefix of the model's weights in their names, if the module trains a model inside it"""

    @property
    def last_layer(self) -> int:
        """The number of the last layer, as BEiT and MAE count: from the embeddings, which are layer 0."""
        return 0

    def is_decayed(self, name: str) -> bool:
        """Return whether weight decay applies: to kernels only, not to biases, norms, tokens or position embeddings."""
        return self.get_parameter(name).ndim >= 2 and name.rpartition(".")[2] == "weight"

    def layer_of(self, name: str) -> int:
        """Return the number of a parameter's layer."""
        return self.last_layer

    def is_head(self, name: str) -> bool:
        """Return whether a parameter is of what fine-tuning adds to a backbone."""
        return name.startswith(HEADS)

    def first_step(self, name: str) -> int:
        """Return the number of the first step that changes a parameter, counted from 0."""
        return 0

    def is_block_matrix(self, name: str) -> bool:
        """Return whether a parameter is a matrix in a block of a ViT; Muon updates these."""
        return False

    def width_of(self, name: str) -> int | None:
        """Return a ViT's width if it is the number of a weight's inputs, up to a factor; None for other weights."""
        return None


class AroundModel(ParameterGroups):
    """A module that trains the model in its attribute `model` for an objective; its own parts are in the last layer."""

    model_prefix = "model."

    @property
    def last_layer(self) -> int:
        return self._inner().last_layer

    def layer_of(self, name: str) -> int:
        is_models = name.startswith(self.model_prefix)
        return self._inner().layer_of(name.removeprefix(self.model_prefix)) if is_models else self.last_layer

    def is_block_matrix(self, name: str) -> bool:
        is_models = name.startswith(self.model_prefix)
        return is_models and self._inner().is_block_matrix(name.removeprefix(self.model_prefix))

    def _inner(self) -> ParameterGroups:
        model = self.get_submodule(self.model_prefix.removesuffix("."))
        assert isinstance(model, ParameterGroups)
        return model


def as_map(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the tokens of patches [b, n, d], in raster order, as a map [b, d, rows, columns]."""
    return nn.functional.fold(tokens.transpose(1, 2), grid, 1)


def check_images(images: Tensor, config: ViTConfig | ResNetConfig, dtype: torch.dtype) -> None:
    """Raise ValueError unless images are [b, c, height, width] as configured, of the dtype of the weights.

    Under autocast any floating-point dtype is allowed.
    """
    expected = (config.in_channels, *config.image_shape)
    if tuple(images.shape[1:]) != expected:
        raise ValueError(
            f"images have shape {list(images.shape)}; this model needs [b, {', '.join(map(str, expected))}]"
        )
    if images.dtype == dtype:
        return  # first, because autocast cannot be queried on the meta device
    if not (images.is_floating_point() and torch.is_autocast_enabled(images.device.type)):
        raise ValueError(f"images are {images.dtype}, but the model's weights are {dtype}")


def check_headless(config: ViTConfig) -> None:
    """Raise ValueError for a ViT with a classifier, which an objective without labels would not train."""
    if config.num_classes or config.representation_head:
        raise ValueError(
            f"the projector replaces the classifier: num_classes is {config.num_classes} and "
            f"representation_head {config.representation_head}; use 0 and False"
        )


def lecun_normal_(drawn: Tensor, generator: torch.Generator) -> None:
    """Draw a kernel [out, in, ...] with variance 1 / fan-in, truncated at two standard deviations."""
    # Truncation there leaves 0.8796 of a normal's standard deviation.
    std = math.sqrt(1 / drawn[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std, generator=generator)


def empty_linear(inputs: int, outputs: int, bias: bool = True, device: torch.device | None = None) -> nn.Linear:
    """Return a layer whose weights are not set yet; torch's own initialisation would advance the global generator."""
    with torch.device("meta"):
        layer = nn.Linear(inputs, outputs, bias=bias)
    return layer.to_empty(device=device or torch.get_default_device())


def generator_of(part: str, seed: int) -> torch.Generator:
    """Return the generator of an objective's own part, because the model is drawn from the seed itself."""
    digest = hashlib.sha256(f"{part}/{seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
