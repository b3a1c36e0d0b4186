"""Two backbones on a folder of images, from `init --from` to the table of accuracy and cost."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import Vitflow
from tests.support.stores import files_of, manifests
from tests.support.vits import TINY, contract_for, randomised
from vit_model.compute import forward_flops
from vit_model.config import ViTConfig
from vit_model.formats import npz
from vit_model.weights import save_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]


def write_images(root: Path) -> None:
    """Noisy images of three colours and of many sizes, in class folders."""
    rng = np.random.default_rng(0)
    for channel, name in enumerate(("red", "green", "blue")):
        (root / name).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 160, (*rng.integers(12, 40, 2), 3), dtype=np.uint8)
            pixels[..., channel] += 60
            Image.fromarray(pixels).save(root / name / f"{number}.png")


def write_weights(folder: Path) -> None:
    """Google's small.npz, and a vitflow folder `wide`, of another width and resolution."""
    for name, fields in (("small", {}), ("wide", {"width": 64, "mlp_dim": 256, "image_size": 16})):
        config = ViTConfig.model_validate(TINY | fields)
        model, contract = randomised(config), contract_for(config)
        if name == "small":
            npz.write(folder / "small.npz", model, contract)
        else:
            (folder / name).mkdir()
            save_model(folder / name, model, contract)


def test_two_backbones_are_compared_and_what_they_cost_is_shown(vitflow_local: Vitflow, tmp_path: Path) -> None:
    write_images(tmp_path / "photos")
    write_weights(tmp_path)
    recipe, store = tmp_path / "which.yaml", tmp_path / "s"
    weights = (tmp_path / "small.npz", tmp_path / "wide")
    said = vitflow_local("init", recipe, "--images", tmp_path / "photos", "--from", *weights).stdout
    assert "chose resolution 8" in said and "images/s measured here" in said
    changes = (
        "finetune.steps=4",
        "finetune.batch_size=8",
        "finetune.learning_rates=[0.001, 0.01]",
        "features.draws=2",
        "features.shots=[1, 5]",
    )
    vitflow_local("run", recipe, "--store", store, *(word for change in changes for word in ("--set", change)))

    [report] = store.glob("artifacts/report/*/attempts/1/files")
    numbers = json.loads((report / "report.json").read_text())
    found = {(group["protocol"], group["labels"].partition(" (")[0]): group for group in numbers["costs"]}
    assert set(found) == {
        ("few-shot linear", "5 labels per class"),
        ("linear probe", "all labels"),
        ("fine-tuning", "all labels"),
    }
    for (protocol, _), group in found.items():
        lines = {line["backbone"]: line for line in group["lines"]}
        assert set(lines) == {"small", "wide"} and group["lines"][0]["minus_best"] is None
        for line in lines.values():
            assert line["forward"]["images_per_second"] > 0 and line["device"] and line["threads"] == 1
            assert (line["training"] is not None) == (protocol == "fine-tuning")
        assert lines["small"]["gflops"] < lines["wide"]["gflops"]
        at = {name: line["resolution"] for name, line in lines.items()}
        assert at == {"small": 8, "wide": 8}
    wide = next(line for line in found["fine-tuning", "all labels"]["lines"] if line["backbone"] == "wide")
    fields = {"width": 64, "mlp_dim": 256, "num_classes": 3}  # the colours
    assert wide["gflops"] == forward_flops(ViTConfig.model_validate(TINY | fields)) / 1e9
    page = (report / "report.html").read_text()
    for text in ("Accuracy and cost", "images/s, forward pass", ">small<", ">wide<"):
        assert text in page

    made = manifests(store)["finetune@backbone=wide"]
    assert "cost.json" in {file["path"] for file in made["files"]}
    assert json.loads((files_of(store, made) / "cost.json").read_text())["gflops"] == wide["gflops"]
    assert not [name for name in made["metrics"] if "per_second" in name], "metrics are the same in every run"
