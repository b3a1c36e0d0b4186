"""A detector learns to find objects, and its parts are drawn from its seed."""

import pytest
import torch

from tests.vit_model.detection.case import drawn
from vit_model.config import ViTConfig
from vit_model.detection.detector import Detector
from vit_model.detection.fcos import Truth, detect, loss
from vit_model.model import ViT

SIDE = 32
TINY = {"image_size": SIDE, "patch_size": 8, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "num_classes": 0}


def detector(seed: int = 0, **options: object) -> Detector:
    made = Detector(ViT(ViTConfig(**(TINY | options))), num_classes=2, channels=32, convs=1)
    made.model.initialise(seed)
    made.initialise(seed)
    return made


def test_it_finds_what_it_was_shown() -> None:
    images, truths = drawn("noise", (4, 3, SIDE, SIDE)) * 0.1, []
    for number, (x, y) in enumerate([(4, 4), (16, 6), (8, 18), (18, 16)]):
        of_class = number % 2
        images[number, of_class, y : y + 10, x : x + 12] += 2.0
        box = torch.tensor([[x, y, x + 12, y + 10]]).float()
        truths.append(Truth(box, torch.tensor([of_class]), torch.tensor([False])))
    model = detector()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        sum(loss(model(images), model.places, truths), torch.zeros(())).backward()
        optimizer.step()
    for found, truth in zip(detect(model.eval()(images), model.places, SIDE, SIDE), truths, strict=True):
        assert found.classes[0] == truth.classes[0]
        torch.testing.assert_close(found.boxes[:1], truth.boxes, atol=2.0, rtol=0)


def test_its_parts_are_drawn_from_the_seed() -> None:
    torch.manual_seed(7)
    one, other = detector(1), detector(1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.pyramid.levels[2][0].weight, detector(2).pyramid.levels[2][0].weight)


def test_tokens_beside_the_patches_are_left_out() -> None:
    with_class = detector(registers=2)
    tokens = with_class.model.encode(with_class.model.embed(drawn("image", (1, 3, SIDE, SIDE))))
    changed = tokens.clone()
    changed[:, :3] = 9.0
    assert torch.equal(with_class.read(tokens).classes, with_class.read(changed).classes)
    after = detector(pooling="gap", norm_after_pooling=True)  # its only norm is behind the pooling
    assert torch.isfinite(after(drawn("image", (1, 3, SIDE, SIDE))).classes).all()
    assert with_class.layer_of("model.blocks.0.attn.qkv.weight") == 1
    assert with_class.layer_of("head.classes.weight") == with_class.last_layer


@pytest.mark.parametrize(
    ("options", "channels", "message"),
    [({"stem": (1,)}, 32, "a hybrid"), ({}, 40, "not a multiple of 32"), ({"image_size": 24}, 32, "cannot be halved")],
)
def test_what_cannot_be_a_detector_is_named(options: dict[str, object], channels: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Detector(ViT(ViTConfig(**(TINY | options))), 2, channels)
