"""Build a model of any family from its configuration.

Every model has `config`, `forward` (logits), `forward_features` (tokens or positions of a feature map [b, n, d], and
the representation [b, d]) and `initialise(seed)`; the parameters of its head are called `head.*`.
"""

from vit_model.config import Architecture, ViTConfig
from vit_model.contract import ModelContract
from vit_model.model import Segmenter, ViT
from vit_model.resnet import ResNet

Network = ViT | ResNet


def build(config: Architecture) -> Network:
    """Build the model on torch's default device, with the weights of `initialise(seed=0)`."""
    return ViT(config) if isinstance(config, ViTConfig) else ResNet(config)


def build_for(contract: ModelContract) -> Network:
    """Build the model that a contract describes, as `build` does: a `Segmenter` if it classifies pixels."""
    architecture = contract.architecture
    if contract.mask_classes and isinstance(architecture, ViTConfig):  # which the contract has checked
        return Segmenter(architecture)
    return build(architecture)
