"""A pretraining with DINO: its schedules, teacher and centre against a loop by hand; alarms for planted collapses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from pipelines.spec.dino import DinoOptions
from ray_jobs.augment.views import make_views, views_of
from ray_jobs.data.sampler import GlobalOrder
from ray_jobs.data.shards import open_dataset
from ray_jobs.training import loop, optim
from tests.support.interrupted import configuration
from vit_model.model import ViT
from vit_model.objectives.dino import Dino, alarms, at_side
from vit_model.preprocessing import normalise
from vit_model.weights import load_model

HEAD = {"hidden_width": 32, "bottleneck_width": 16, "output_width": 16}
FIELDS: dict[str, Any] = {"objective": "dino", "augment": "resized_crop_flip", "dtype": "float32", "keep_steps": ()}
NORMAL: dict[str, Any] = {
    "local_crops": 1,
    "local_size": 4,
    "teacher_temperature": 0.02,
    "warmup_teacher_temperature": 0.02,
    "momentum": 0.99,
    **HEAD,
}


def test_the_temperature_of_the_teacher_rises_linearly_during_its_warm_up() -> None:
    options = DinoOptions(teacher_temperature=0.07, warmup_teacher_fraction=0.3)
    found = [options.temperature(step, 100) for step in (0, 10, 15, 30, 99)]
    assert found == pytest.approx([0.04, 0.05, 0.055, 0.07, 0.07])
    assert {DinoOptions().temperature(step, 100) for step in range(100)} == {0.04}


def test_a_training_is_a_loop_by_hand_and_its_result_the_teacher(dataset: Path, tmp_path: Path) -> None:
    """The teacher's temperature, momentum and centre of each step, and a last layer that waits for three steps."""
    settings = {"local_crops": 2, "local_size": 4, "teacher_temperature": 0.07, "freeze_last_layer": 0.5} | HEAD
    config = configuration(**FIELDS, steps=6, dino=settings, seed=3)
    metrics = loop.train(config, open_dataset(dataset), tmp_path)
    trained, contract = load_model(tmp_path)
    model = ViT(contract.architecture)
    model.initialise(3)
    task = Dino(model, 32, 16, 16, frozen_steps=3, seed=3)
    optimizer = optim.make_optimizer(task, config.optimizer, config.learning_rate)
    teacher, centre, losses = Dino(ViT(contract.architecture), 32, 16, 16), torch.zeros(16), []
    teacher.load_state_dict(task.state_dict())
    opened, first = open_dataset(dataset), task.projector.last_layer.weight.detach().clone()
    images = torch.from_numpy(opened.images("train", contract.preprocessing))
    order = GlobalOrder(48, contract.training_data, 3)
    for step in range(6):
        positions = np.arange(12 * step, 12 * step + 12)
        pixels = images[torch.from_numpy(order.rows(positions))]
        views = [
            normalise(view, contract.preprocessing, torch.float32)
            for view in make_views(pixels, views_of(config), "resized_crop_flip", 3, positions)
        ]
        temperature = (0.04, 0.055, 0.07, 0.07, 0.07, 0.07)[step]
        with torch.no_grad():
            given = [teacher.projector(teacher.model(view)) for view in views[:2]]
        outputs = [task.projector(at_side(model, view.shape[-1])(view)) for view in views]
        pairs = [
            functional.cross_entropy(output / 0.1, ((target - centre) / temperature).softmax(1))
            for number, target in enumerate(given)
            for other, output in enumerate(outputs)
            if other != number
        ]
        loss = torch.stack(pairs).mean()
        optim.set_learning_rate(optimizer, optim.learning_rate(step, 6, config.learning_rate, config.optimizer), step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        kept = 1 - 0.004 * (1 + np.cos(np.pi * step / 6)) / 2
        with torch.no_grad():
            for average, weight in zip(teacher.parameters(), task.parameters(), strict=True):
                average.copy_(kept * average + (1 - kept) * weight)
        centre = 0.9 * centre + 0.1 * torch.cat(given).mean(0)
        assert torch.equal(task.projector.last_layer.weight, first) == (step < 3)
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert [point["loss"] for point in curve] == pytest.approx(losses, rel=1e-4)
    for (name, ours), theirs in zip(trained.named_parameters(), teacher.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=name)
    distance = max((ours - theirs).abs().max() for ours, theirs in zip(trained.parameters(), model.parameters()))  # noqa: B905
    assert distance > 1e-4, "the student is another model"
    assert (contract.class_names, contract.architecture.num_classes) == ((), 0)
    assert {"teacher_entropy", "mean_entropy", "feature_rank"} <= metrics.keys()


def test_nothing_is_alarmed_while_the_rate_warms_up(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = FIELDS | {"dino": NORMAL | {"teacher_temperature": 100, "warmup_teacher_temperature": 100}}
    for warmup in (4, 0):
        config = configuration(**fields, steps=4, optimizer={"warmup_steps": warmup})
        loop.train(config, open_dataset(dataset), tmp_path)
        assert ("warning: step 3: " in capsys.readouterr().err) == (not warmup)


@pytest.mark.parametrize(
    ("planted", "alarm"),
    [
        ({}, None),
        ({"centre_momentum": 1.0}, "the teacher's outputs are nearly the same for all images"),
        (
            {"teacher_temperature": 0.1, "warmup_teacher_temperature": 0.1},
            "the teacher's outputs are nearly uniform for all images",
        ),
    ],
    ids=["sound", "no centring", "no sharpening"],
)
def test_a_planted_collapse_is_found_and_warned_of_once(
    planted: dict[str, float], alarm: str | None, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = {"schedule": "constant"}
    config = configuration(**FIELDS, steps=60, learning_rate=6e-3, optimizer=optimizer, dino=NORMAL | planted)
    metrics = loop.train(config, open_dataset(dataset), tmp_path)
    warned = capsys.readouterr().err
    found = alarms({name: float(metrics[name]) for name in ("teacher_entropy", "mean_entropy", "feature_rank")})
    if alarm is None:  # a sound training may pass through such a state
        assert found == {}
    else:
        (sentence,) = found.values()
        assert alarm in sentence and warned.count(alarm) == 1
