"""The ResNets and the hybrids' stem against timm's, with the same random weights; their numbers, files and errors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from tests.support import timm_models
from tests.support.parity import assert_close
from tests.support.vits import contract_for, noise, randomised
from vit_model.build import build
from vit_model.config import Architecture, ResNetConfig, ViTConfig
from vit_model.contract import ModelContract
from vit_model.resnet import ResNet, Stem
from vit_model.variants import RESNETS
from vit_model.weights import load_model, save_model, transfer_backbone

SMALL: dict[str, Any] = {"units": (1, 2), "image_size": 24, "num_classes": 5}
VIT = ViTConfig(image_size=24, patch_size=8, width=8, depth=1, num_heads=1, mlp_dim=8)
SMALL_IMAGES: dict[str, Any] = {"image_size": 64, "num_classes": 5}
WIDE: dict[str, Any] = {"units": (2, 1), "width_factor": 2, "in_channels": 1, "image_size": 25, "num_classes": 3}
# timm's resnetv2_*_bit with 1000 classes.
PUBLISHED = {
    "R50x1": 25_549_352,
    "R50x3": 217_319_080,
    "R101x1": 44_541_480,
    "R101x3": 387_934_888,
    "R152x2": 236_335_208,
    "R152x4": 936_533_224,
}


@pytest.fixture(scope="module")
def timm() -> ModuleType:
    return timm_models.load()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def timm_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under timm's names: its head is a 1x1 convolution."""
    out = {name.replace("head.", "head.fc."): tensor for name, tensor in tensors.items()}
    return {name: x[:, :, None, None] if name == "head.fc.weight" else x for name, x in out.items()}


def timms_bit(config: ResNetConfig) -> nn.Module:
    from timm.layers import StdConv2d as TimmStdConv2d  # type: ignore[import-untyped]
    from timm.models.resnetv2 import ResNetV2  # type: ignore[import-untyped]

    theirs: nn.Module = ResNetV2(
        layers=config.units,
        channels=tuple(256 * 2**index for index in range(len(config.units))),
        num_classes=config.num_classes,
        in_chans=config.in_channels,
        width_factor=config.width_factor,
        stem_type="fixed",
        conv_layer=TimmStdConv2d,
    )
    return theirs


@pytest.mark.parametrize(
    ("config", "dtype", "tolerance"),
    [
        (ResNetConfig(**SMALL), torch.float32, 1e-5),
        (ResNetConfig(**SMALL | {"image_size": (29, 42)}), torch.float64, 1e-10),
        (ResNetConfig(**WIDE), torch.float64, 1e-10),
        pytest.param(ResNetConfig.variant("R50x1", **SMALL_IMAGES), torch.float64, 1e-10, marks=pytest.mark.slow),
    ],
    ids=["small", "odd sides", "twice as wide, grey", "R50x1"],
)
def test_logits_and_gradients_equal_timms_bit(
    timm: ModuleType, config: ResNetConfig, dtype: torch.dtype, tolerance: float
) -> None:
    ours, theirs = randomised(ResNet(config)).to(dtype), timms_bit(config).to(dtype)
    for module in theirs.modules():
        if hasattr(module, "eps") and isinstance(module, nn.Conv2d):
            module.eps = 1e-10  # BiT's; timm's own is 1e-8
    theirs.load_state_dict(timm_names(dict(ours.state_dict())), strict=True)
    images, labels = noise(2, config.in_channels, *config.image_shape).to(dtype), torch.tensor([2, 0])
    logits, expected = ours(images), theirs(images)
    assert_close({"logits": logits.detach()}, {"logits": expected.detach()}, tolerance)
    F.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
    F.cross_entropy(expected, labels).backward()  # type: ignore[no-untyped-call]
    assert_close(timm_names(gradients(ours)), gradients(theirs), tolerance)


def standardised(weight: Tensor) -> Tensor:
    """As models_resnet.py writes it: minus the mean, over the deviation plus 1e-5."""
    rows = weight.flatten(1)
    centred = rows - rows.mean(1, keepdim=True)
    deviation = centred.square().mean(1, keepdim=True).sqrt()
    return (centred / (deviation + 1e-5)).view_as(weight)


@pytest.mark.slow
@pytest.mark.parametrize("units", [(), (1, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("sides", [(32, 32), (33, 46), (39, 25)], ids=str)
def test_the_stem_of_hybrids_is_timms_with_the_authors_standardisation(
    timm: ModuleType, units: tuple[int, ...], sides: tuple[int, int]
) -> None:
    from timm.layers import Conv2dSame, GroupNormAct, StdConv2dSame
    from timm.models.resnetv2 import ResNetV2

    def theirs(conv: Any, eps: float) -> nn.Module:
        made = ResNetV2(
            layers=units,
            channels=tuple(256 * 2**index for index in range(len(units))),
            preact=False,
            num_classes=0,
            global_pool="",
            stem_type="same",
            conv_layer=conv,
            norm_layer=partial(GroupNormAct, num_groups=32, eps=eps),
        )
        made.norm = nn.Identity()
        return made.double()  # type: ignore[no-any-return]

    ours = randomised(Stem(units, 3)).double()
    weights = dict(ours.named_parameters())
    images = noise(2, 3, *sides).double()
    maps = ours(images)

    # timm's network of plain convolutions, whose kernels are standardised outside of it
    kernels = {name: standardised(w) if w.ndim == 4 else w for name, w in weights.items()}
    plain = theirs(partial(Conv2dSame, bias=False), 1e-6)
    assert {name for name, _ in plain.named_parameters()} == kernels.keys()
    expected = torch.func.functional_call(plain, kernels, (images,))
    assert_close({"maps": maps}, {"maps": expected}, 1e-12)
    direction = noise(*maps.shape, seed=2).double()
    found = dict(zip(weights, torch.autograd.grad((maps * direction).sum(), list(weights.values())), strict=True))
    reference = torch.autograd.grad((expected * direction).sum(), list(weights.values()))
    assert_close(found, dict(zip(weights, reference, strict=True)), 1e-10)

    # and its own, whose constants differ: 1e-8 inside the variance, 1e-5 in the norms
    own = theirs(partial(StdConv2dSame, eps=1e-8), 1e-5)
    own.load_state_dict(ours.state_dict(), strict=True)
    assert_close({"maps": maps}, {"maps": own(images)}, 1e-3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_timms(name: str) -> None:
    config = ResNetConfig.variant(name, image_size=224, num_classes=1000)
    assert config.num_parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    "fields",
    [
        *({"units": units, "width_factor": factor} for units, factor in RESNETS.values() if factor < 3),
        {"units": (1,), "in_channels": 1, "num_classes": 0},
        {"units": (2, 1, 3), "width_factor": 3, "num_classes": 7},
    ],
    ids=str,
)
def test_what_is_built_is_what_is_counted(fields: dict[str, Any]) -> None:
    config = ResNetConfig(image_size=224, **fields)
    with torch.device("meta"):
        model = build(config)
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert config.num_blocks == sum(name.endswith("conv2.weight") for name, _ in model.named_parameters())


@pytest.mark.parametrize("sides", [(1, 1), (8, 8), (31, 33), (65, 40)], ids=str)
def test_features_are_places_of_the_map_in_raster_order_and_their_mean(sides: tuple[int, int]) -> None:
    config = ResNetConfig.model_validate(SMALL | {"image_size": sides, "units": (1, 1, 1)})
    model, images = randomised(ResNet(config)), noise(2, 3, *sides)
    seen: list[Tensor] = []
    handle = model.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    features, representation = model.forward_features(images)
    handle.remove()
    rows, columns = config.grid
    assert features.shape == (2, rows * columns, config.width)
    assert torch.equal(features.mT.view(2, config.width, rows, columns), seen[0].relu())
    assert torch.equal(representation, features.mean(dim=1))
    torch.testing.assert_close(model(images), F.linear(representation, model.head.weight, model.head.bias))
    bare = ResNet(config.model_copy(update={"num_classes": 0}))
    assert torch.equal(bare(images), bare.forward_features(images)[1])


def test_initialisation_follows_the_table() -> None:
    config = ResNetConfig.model_validate(SMALL | {"head_bias": -10.0})
    before = torch.get_rng_state()
    model, other = ResNet(config), ResNet(config)
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 4:
            assert tensor.std().item() == pytest.approx(tensor[0].numel() ** -0.5, rel=0.03), name
            # cut at 2 / 0.8796 standard deviations
            assert tensor.abs().max() < 2.3 * tensor[0].numel() ** -0.5
        elif "norm" in name:
            assert torch.equal(tensor, torch.full_like(tensor, float(name.endswith("weight"))))
        else:
            assert torch.equal(tensor, torch.full_like(tensor, -10.0 if name == "head.bias" else 0.0)), name
    other.initialise(seed=7)
    assert not torch.equal(model.stem["conv"].weight, other.stem["conv"].weight)
    other.to(torch.bfloat16)
    other.initialise(seed=0)
    assert all(torch.equal(p.bfloat16(), other.get_parameter(name)) for name, p in model.named_parameters())


# ------------------------------------------------------------------------------------------------ configurations


def test_architectures_are_told_apart_by_family_and_the_old_ones_are_vits() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Architecture)
    for config in (
        ResNetConfig.variant("R152x2", image_size=224, num_classes=3),
        ViTConfig.variant("R50+B/16", image_size=224),
    ):
        assert adapter.validate_python(config) == config
        assert adapter.validate_json(config.model_dump_json()) == config
    old = ViTConfig.variant("Ti/16", image_size=32).model_dump(mode="json")
    del old["family"]
    assert adapter.validate_python(old) == ViTConfig.variant("Ti/16", image_size=32)
    for family in ("cnn", [], None):
        with pytest.raises(ValidationError, match="family must be one of vit, resnet"):
            adapter.validate_python(old | {"family": family})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ResNetConfig.variant("B/16", image_size=8), "variant 'B/16' is a ViT, not for a ResNetConfig"),
        (lambda: ViTConfig.variant("R50x1", image_size=8), "variant 'R50x1' is a ResNet, not for a ViTConfig"),
        (lambda: ResNetConfig(units=(), image_size=8), "at least 1 item"),
        (lambda: ResNetConfig(units=(1,), image_size=(8, 0)), "greater than 0"),
    ],
)
def test_wrong_configurations(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 24, 25), r"images have shape \[2, 3, 24, 25\]; this model needs \[b, 3, 24, 24\]"),
        (torch.zeros(2, 1, 24, 24), r"images have shape \[2, 1, 24, 24\]; this model needs \[b, 3, 24, 24\]"),
        (torch.zeros(3, 24, 24), r"images have shape \[3, 24, 24\]"),
        (
            torch.zeros(2, 3, 24, 24).double(),
            r"images are torch.float64, but the model's weights are torch.float32",
        ),
        (torch.zeros(2, 3, 24, 24, dtype=torch.uint8), "images are torch.uint8, but the model's weights"),
    ],
)
@pytest.mark.parametrize("family", ["resnet", "vit"])
def test_images_that_do_not_fit_are_refused(family: str, images: Tensor, message: str) -> None:
    model = build(ResNetConfig.model_validate(SMALL) if family == "resnet" else VIT)
    with pytest.raises(ValueError, match=message):
        model(images)


def test_under_autocast_images_may_have_another_dtype() -> None:
    model = ResNet(ResNetConfig.model_validate(SMALL))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.forward_features(torch.zeros(1, 3, 24, 24).bfloat16())[1].isfinite().all()


# ---------------------------------------------------------------------------------------------------------- files


def test_a_saved_resnet_is_loaded_as_it_was(tmp_path: Path) -> None:
    model = randomised(ResNet(ResNetConfig.model_validate(SMALL)))
    save_model(tmp_path, model, contract_for(model.config))
    loaded, contract = load_model(tmp_path)
    assert isinstance(loaded, ResNet) and not loaded.training
    assert (loaded.config, contract) == (model.config, contract_for(model.config))
    assert torch.equal(loaded(noise(2, 3, 24, 24)), model.eval()(noise(2, 3, 24, 24)))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("field", "value"), [("units", [1, 10**15]), ("width_factor", 10**9), ("units", [1, 2, 1])])
def test_a_contract_of_other_sizes_is_refused_before_it_is_built(tmp_path: Path, field: str, value: object) -> None:
    model = ResNet(ResNetConfig.model_validate(SMALL))
    save_model(tmp_path, model, contract_for(model.config))
    contract = contract_for(model.config).model_dump(mode="json")
    contract["architecture"][field] = value
    (tmp_path / "config.json").write_text(ModelContract.model_validate(contract).model_dump_json())
    with pytest.raises(ValueError, match=r"the architecture in config\.json has"):
        load_model(tmp_path)


def test_the_body_of_a_resnet_transfers_at_any_resolution() -> None:
    source = randomised(ResNet(ResNetConfig.model_validate(SMALL)))
    model = build(source.config.for_finetuning(37, 11))
    assert transfer_backbone(model, source) == [
        "head: the source's 5 classes were dropped",
        "head: newly initialised for 11 classes",
    ]
    for name, tensor in model.state_dict().items():
        if name.startswith("head."):
            assert not tensor.any() and tensor.shape[0] == 11
        else:
            assert torch.equal(tensor, source.state_dict()[name]), name
    assert model(noise(2, 3, 37, 37)).shape == (2, 11)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ResNetConfig(**SMALL | {"units": (2, 2)}), r"units is \(1, 2\) in the backbone, \(2, 2\) in the model"),
        (ResNetConfig(**SMALL | {"in_channels": 1}), "in_channels is 3 in the backbone, 1 in the model"),
        (VIT, "family is 'resnet' in the backbone, 'vit' in the model"),
    ],
)
def test_another_body_is_refused(other: Architecture, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transfer_backbone(build(other), ResNet(ResNetConfig.model_validate(SMALL)))
