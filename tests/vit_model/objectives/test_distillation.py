"""Distillation against transformers' DeiT and the published formulas, written out with torch's functions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.parity import assert_close, gradients_by_our_names, randomise
from tests.support.vits import TINY, randomised, transformers
from vit_model.build import build
from vit_model.config import ResNetConfig, ViTConfig
from vit_model.contract import Preprocessing
from vit_model.formats import hugging_face
from vit_model.model import ViT
from vit_model.objectives.distillation import Student, Teacher, imitation

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
PREPROCESSING = Preprocessing(mean=MEAN, std=STD, resolution=8, channels=3)


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    described = {"image_mean": MEAN, "image_std": STD, "image_processor_type": "ViTImageProcessor"}
    described |= {"size": {"height": 8, "width": 8}, "resample": 2, "rescale_factor": 1 / 255}
    (folder / "preprocessor_config.json").write_text(json.dumps(described))


def network(**fields: Any) -> Any:
    return randomised(ViTConfig(**TINY | {"num_classes": 3} | fields))


def test_a_token_learns_from_the_teacher_as_transformers_deit_does(tmp_path: Path) -> None:
    """Both classifiers' logits, and the loss and gradients of DeiT's equation 3."""
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_labels": 3}
    config = transformers().DeiTConfig(**sizes, num_attention_heads=2, intermediate_size=32)
    theirs = transformers().DeiTForImageClassificationWithTeacher(config)
    randomise(theirs)
    save(theirs, tmp_path / "weights")
    read = hugging_face.read
    imported = read(tmp_path / "weights")
    ours = ViT(imported.architecture)
    ours.load_state_dict(imported.weights)
    assert ours.config.distillation
    images, labels, taught = torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1]), torch.randn(5, 3)
    student = Student(ours).train()
    logits, answers = student(images)
    out = theirs(images)
    torch.testing.assert_close(logits, out.cls_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answers, out.distillation_logits, rtol=1e-4, atol=1e-5)
    loss = 0.5 * F.cross_entropy(logits, labels) + 0.5 * imitation("hard", answers, taught)
    expected = 0.5 * F.cross_entropy(out.cls_logits, labels)
    expected = expected + 0.5 * F.cross_entropy(out.distillation_logits, taught.argmax(1))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    expected.backward()
    gradients = gradients_by_our_names(theirs, save, read, tmp_path / "gradients")
    assert_close({name: weight.grad for name, weight in ours.named_parameters()}, gradients)


def test_soft_targets_and_features_are_the_published_formulas() -> None:
    ours, theirs = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    p, log_q = (theirs / 3).softmax(1), (ours / 3).softmax(1).log()
    expected = 9 * (p * (p.log() - log_q)).sum(1).mean()
    torch.testing.assert_close(imitation("soft", ours, theirs, 3.0), expected)
    units = ours / ours.norm(dim=1, keepdim=True), theirs / theirs.norm(dim=1, keepdim=True)
    expected = 0.5 * (units[0] - units[1]).square().sum(1).mean()
    torch.testing.assert_close(imitation("features", ours, theirs), expected)
    assert imitation("features", theirs * 5, theirs).item() == pytest.approx(0, abs=1e-6)


def test_a_teacher_answers_in_the_students_order_without_dropout_or_a_gradient() -> None:
    model = network(dropout=0.5, stochastic_depth=0.5, num_classes=4).train()
    pixels = torch.randint(256, (5, 8, 8, 3), dtype=torch.uint8)
    taught = Teacher(model, PREPROCESSING, "soft", [2, 0, 3]).answers(pixels)
    inputs = (pixels.permute(0, 3, 1, 2) / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    expected = network(num_classes=4).eval()(inputs)[:, [2, 0, 3]]
    torch.testing.assert_close(taught, expected, rtol=1e-4, atol=1e-5)
    assert not taught.requires_grad


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_features_are_compared_after_a_linear_map(family: str) -> None:
    model = network() if family == "vit" else build(ResNetConfig(units=(1,), image_size=8, num_classes=3))
    student = Student(model, teacher_width=24, seed=1)
    images = torch.randn(2, 3, 8, 8)
    logits, answers = student.train()(images)
    _, representation = model.forward_features(images)
    torch.testing.assert_close(logits, model(images), rtol=1e-4, atol=1e-5)
    expected = representation @ student.projection.weight.T + student.projection.bias
    torch.testing.assert_close(answers, expected, rtol=1e-4, atol=1e-5)
    assert answers.shape == (2, 24) and student.eval()(images).shape == (2, 3)
