"""Two models of the same weights side by side: outputs and gradients, tensor by tensor."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from vit_model.config import ViTConfig
from vit_model.contract import ModelContract
from vit_model.formats import Imported
from vit_model.model import ViT
from vit_model.weights import resize_positions

TOLERANCE = 1e-5
Read = Callable[[Path], Imported]


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter off its start, so that no bias is zero and no norm the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim < 2 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def gradients_by_our_names(
    theirs: nn.Module, save: Callable[[nn.Module, Path], object], read: Read, folder: Path
) -> dict[str, Tensor]:
    """Their gradients, saved as if they were weights and read back: what reads weights renames them."""
    carrier = copy.deepcopy(theirs).float()  # what a file of weights holds
    with torch.no_grad():
        for parameter, source in zip(carrier.parameters(), theirs.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    save(carrier, folder)
    return read(folder).weights


def contract_of(imported: Imported) -> ModelContract:
    """The contract of weights that were read."""
    assert imported.preprocessing is not None
    return ModelContract(
        architecture=imported.architecture,
        class_names=imported.class_names,
        preprocessing=imported.preprocessing,
        training_data="unknown",
        license=imported.license,
    )


def our_outputs(imported: Imported, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, or the representation, of images of any size, and the native weights, for their gradients.

    Computed in the precision of the images. Gradients are compared in doubles: in single precision, rounding alone
    reaches the tolerance with some draws of the weights.
    """
    native = imported.architecture
    size = (images.shape[2], images.shape[3])
    config = ViTConfig.model_validate(native.model_dump() | {"image_size": size})
    weights = {name: tensor.to(images.dtype, copy=True).requires_grad_() for name, tensor in imported.weights.items()}
    resized = dict(weights)
    resize_positions(resized, native, config)
    return torch.func.functional_call(ViT(config).eval(), resized, images), weights


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """||a - b|| <= tolerance max(||b||, 1e-3 of the global norm), tensor by tensor."""
    assert ours.keys() == theirs.keys()
    floor = 1e-3 * torch.cat([tensor.flatten() for tensor in theirs.values()]).norm()
    wrong = {
        name: f"{(ours[name] - theirs[name]).norm() / max(theirs[name].norm(), floor):.1e}"
        for name in ours
        if (ours[name] - theirs[name]).norm() > tolerance * max(theirs[name].norm(), floor)
    }
    assert not wrong, wrong
