"""ONNX: onnxruntime computes our logits from our file. Run: pytest tests/vit_model/formats/test_onnx.py."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import vits
from tests.support.paths import ROOT
from tests.support.vits import random_images, randomised
from vit_model.build import build
from vit_model.config import Architecture, ResNetConfig, ViTConfig
from vit_model.contract import ModelContract
from vit_model.formats import onnx

SMALL = vits.SMALL | {"depth": 1, "dropout": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "cls": {"representation_head": True, "depth": 2},
    "gap, exact": {"pooling": "gap", "norm_after_pooling": True, "class_token": True, "gelu": "exact"},
    "MAP, no head": {"pooling": "map", "num_classes": 0},
    "registers, LayerScale": {"registers": 3, "layer_scale": 0.1, "norm_first": True, "gelu": "quick"},
    "hybrid": {"stem": (1,), "patch_size": 8, "image_size": 24},
    "rotary, SwiGLU": {"position": "rope", "gelu": "swiglu", "image_size": (8, 12)},
    "relative, not square": {"position": "relative", "image_size": (8, 12)},
    "ResNet": {"units": (1, 1), "image_size": (25, 32)},
    "axial": {"pooling": "gap", "position": "learned2d", "axial": True},
}


def configuration(**fields: Any) -> Architecture:
    if "units" in fields:
        return ResNetConfig.model_validate(fields | {"num_classes": 7})
    return ViTConfig.model_validate(SMALL | fields)


def contract_for(config: Architecture) -> ModelContract:
    names = [f"Größe {index}" for index in range(config.num_classes)]
    return vits.contract_for(config, names, "Apache-2.0", mean=(0.1,) * 3, std=(0.3,) * 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_onnxruntime_computes_our_logits(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    config = configuration(**KINDS[kind])
    model = randomised(config)
    path = tmp_path / "model.onnx"
    onnx.write(path, model, contract_for(config))
    assert capfd.readouterr() == ("", "")
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    model.eval()
    for batch in (1, 3):
        images = random_images(config, batch, seed=batch)
        (theirs,) = session.run(None, {"images": images.numpy()})
        ours = model(images).numpy()
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(ours).max(), batch
    assert [output.name for output in session.get_outputs()] == ["logits" if config.num_classes else "representation"]

    said = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
    assert said == contract_for(config).model_dump(mode="json")
    assert str(ROOT).encode() not in path.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    config = configuration()
    with pytest.raises(ImportError, match=r"pip install 'vitflow\[onnx\]'"):
        onnx.write(tmp_path / "model.onnx", build(config), contract_for(config))


def test_another_contract_and_nan_are_refused(tmp_path: Path) -> None:
    model = build(configuration())
    with pytest.raises(ValueError, match="contract is for"):
        onnx.write(tmp_path / "model.onnx", model, contract_for(configuration(num_classes=3)))
    with torch.no_grad():
        model.norm.bias[0] = math.nan
    with pytest.raises(ValueError, match=r"weight 'norm\.bias' holds NaN"):
        onnx.write(tmp_path / "model.onnx", model, contract_for(model.config))
    assert not list(tmp_path.iterdir())
