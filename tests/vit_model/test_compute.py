"""Operations against the papers' tables and torch's FLOP counter. Run: pytest tests/vit_model."""

import subprocess
import sys
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.vits import OPTIONS, SMALL
from vit_model import compute, lora
from vit_model.build import Network, build
from vit_model.config import Architecture, LoRAOptions, ResNetConfig, ViTConfig
from vit_model.model import ViT
from vit_model.parts import HEADS
from vit_model.variants import RESNETS

JFT_IMAGES = 303e6
# The paper's table 6: epochs on JFT, exaFLOPs, and by how many % ours are more. A hybrid's 859 for 7 epochs and 1668
# for 14 don't agree with each other: half of the latter is 834. Of the ResNets we count 3.5 to 5 % more throughout;
# the paper does not say how it counted, and strides in the 1x1 convolutions would explain a part only.
TABLE_6 = [
    ("B/32", 7, 55, 2.34),
    ("B/16", 7, 224, -0.14),
    ("L/32", 7, 196, -0.03),
    ("L/16", 7, 783, 0.07),
    ("L/16", 14, 1567, 0.01),
    ("H/14", 14, 4262, -0.08),
    ("R50x1", 7, 50, 4.98),
    ("R50x2", 7, 199, 3.52),
    ("R101x1", 7, 96, 3.89),
    ("R152x1", 7, 141, 4.24),
    ("R152x2", 7, 563, 3.72),
    ("R152x2", 14, 1126, 3.72),
    ("R200x3", 14, 3306, 3.51),
    ("R50+B/32", 7, 106, 1.71),
    ("R50+B/16", 7, 274, 0.09),
    ("R50+L/32", 7, 246, 0.53),
    ("R50+L/16", 7, 859, -2.88),
    ("R50+L/16", 14, 1668, 0.03),
]

Trained = Literal["all", "head", "biases"] | LoRAOptions

RESNET_SHAPES: list[dict[str, Any]] = [
    {"units": (1, 2), "image_size": 64},
    {"units": (2, 1, 1), "image_size": (50, 77), "width_factor": 2, "in_channels": 1},
]
SHAPES: dict[str, Architecture] = {
    **{str(options): ViTConfig.model_validate(SMALL | options) for options in [{}, *OPTIONS]},
    **{str(shape): ResNetConfig.model_validate(shape | {"num_classes": 10}) for shape in RESNET_SHAPES},
}


def logits(model: Any, images: Tensor) -> Tensor:
    """By way of all tokens, even if `forward` left out those that the classifier never reads."""
    tokens, representation = model.forward_features(images)
    out: Tensor = model.head(representation)
    return out + model.head_dist(tokens[:, 1]) if hasattr(model, "head_dist") else out


def restrict(model: Network, trained: Trained) -> None:
    """Train some weights of a model only."""
    if isinstance(trained, LoRAOptions):
        assert isinstance(model, ViT)
        lora.add(model, trained, seed=0)
    for name, weight in model.named_parameters():
        is_trained = {"all": True, "biases": name.endswith(".bias"), "head": False}.get(str(trained), ".lora." in name)
        weight.requires_grad_(is_trained or name.startswith(HEADS))


def counted(config: Architecture, backward: bool = False, trained: Trained = "all") -> int:
    """Operations of one image as torch counts them, without memory or work for them."""
    with torch.device("meta"):
        model = build(config)
        restrict(model, trained)
        image = torch.empty(1, config.in_channels, *config.image_shape)
        with FlopCounterMode(display=False) as counter:
            out = logits(model, image)
            if backward:
                out.sum().backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_that_torch_counts(shape: str) -> None:
    assert compute.forward_flops(SHAPES[shape]) == counted(SHAPES[shape])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Ti/16", "R50+B/16", "R50x1"])
def test_flops_of_the_papers_models_are_those_that_torch_counts(name: str) -> None:
    config = named(name, num_classes=1000)
    forward, step = counted(config), counted(config, backward=True)
    assert compute.forward_flops(config) == forward
    # Nobody asks for the gradient by the pixels, so the first product has only half of its backward pass.
    first = 112 * 112 * 7 * 7 * 3 * 64 if name.startswith("R") else 224 * 224 * 3 * config.width
    assert compute.train_flops(config) - 2 * first == step


@pytest.mark.parametrize("trained", ["head", "biases", LoRAOptions()], ids=str)
def test_flops_of_few_trained_weights_are_those_that_torch_counts(trained: Any) -> None:
    """What needs no gradient before the first trained weight is a part of 1% to 3%."""
    config = named("Ti/16", num_classes=1000)
    said = compute.restricted_train_flops(config, trained)
    assert said == pytest.approx(counted(config, backward=True, trained=trained), rel=0.03)
    assert said < 0.75 * compute.train_flops(config)


def named(name: str, **fields: Any) -> Architecture:
    family = ResNetConfig if name in RESNETS else ViTConfig
    return family.variant(name, image_size=224, **fields)


def pretraining(name: str) -> Architecture:
    """As in the paper: at 224, 18,291 classes of JFT, a ViT's behind a tanh layer."""
    tanh = {} if name in RESNETS else {"representation_head": True}
    return named(name, num_classes=18_291, **tanh)


def exaflops(name: str, images: float) -> float:
    return compute.train_flops(pretraining(name)) * images / 1e18


@pytest.mark.parametrize(("name", "epochs", "published", "gap"), TABLE_6)
def test_exaflops_beside_the_papers(name: str, epochs: int, published: float, gap: float) -> None:
    found = 100 * (exaflops(name, epochs * JFT_IMAGES) / published - 1)
    assert found == pytest.approx(gap, abs=0.006)
    if not name.startswith("R"):  # the ViTs: the table rounds B/32 to 55
        assert abs(found) < (2.5 if name == "B/32" else 0.5)


def test_costs_need_no_torch() -> None:
    code = "import sys, vit_model.compute; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
