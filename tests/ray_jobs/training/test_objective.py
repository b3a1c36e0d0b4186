"""What a pretraining minimises: mixed labels, patch targets and MoCo v3, each against a loop without DeepSpeed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from pipelines.spec import Finetune, Pretrain
from ray_jobs.augment import augment, uniform
from ray_jobs.augment.mixing import mix, plan
from ray_jobs.augment.randaugment import randaugment
from ray_jobs.augment.views import VIEWS, make_views
from ray_jobs.data import shards
from ray_jobs.training import loop, optim
from ray_jobs.training.model_ref import ModelRef
from ray_jobs.training.task import make_task
from tests.support import datasets
from tests.support.objectives import MAE
from tests.support.pretraining import DEEP, pretraining
from tests.support.vits import contract_for
from vit_model import compute
from vit_model.config import MaeOptions, ViTConfig
from vit_model.errors import UserError
from vit_model.model import ViT
from vit_model.objectives.contrastive import MoCo, MomentumEncoder
from vit_model.objectives.distillation import Student, imitation
from vit_model.objectives.masked_autoencoder import MaskedAutoencoder
from vit_model.objectives.masked_patches import MaskedPatches
from vit_model.objectives.momentum import momentum
from vit_model.preprocessing import normalise
from vit_model.weights import load_model, save_model

CLASSES = ("left", "right", "top")
CONTRASTIVE = {
    "objective": "contrastive",
    "contrastive": {"hidden_width": 24, "output_width": 12, "temperature": 0.3},
    "model": DEEP | {"position": "sincos2d_moco"},
    "augment": "resized_crop_flip",
    "zero_stage": 2,
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Colours of 8x8 with a bright half that says the class: 48 to train on."""
    return datasets.put_halves(tmp_path_factory.mktemp("dataset"), {"train": 48}, CLASSES, channels=3)


def configuration(**fields: object) -> Pretrain:
    return pretraining(**{"steps": 6, "workers": 1, "dtype": "float32"} | fields)


class Reference:
    """The same training by hand: each step's images and positions, and AdamW."""

    def __init__(self, config: Pretrain, dataset: Path, folder: Path, task: torch.nn.Module) -> None:
        _, self.contract = load_model(folder)
        opened = shards.open_dataset(dataset)
        self.config, self.task = config, task
        self.optimizer = optim.make_optimizer(task, config.optimizer, config.learning_rate)
        if config.objective == "contrastive":  # the authors hand all parameters to torch's AdamW
            trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
            settings = config.optimizer
            self.optimizer = torch.optim.AdamW(trained, betas=settings.betas, weight_decay=settings.weight_decay)
        self.images = torch.from_numpy(opened.images("train", self.contract.preprocessing))
        self.labels = torch.from_numpy(opened.labels("train"))
        self.losses: list[float] = []

    def batches(self):
        """(step, images, labels, positions) of each step, in the order that the loop itself takes."""
        from ray_jobs.data.sampler import GlobalOrder

        order = GlobalOrder(48, self.contract.training_data, self.config.seed)
        for step in range(self.config.steps):
            positions = np.arange(16 * step, 16 * step + 16)
            chosen = torch.from_numpy(order.rows(positions))
            yield step, self.images[chosen], self.labels[chosen], positions

    def inputs(self, images: torch.Tensor) -> torch.Tensor:
        return normalise(images, self.contract.preprocessing, torch.float32)

    def update(self, step: int, loss: torch.Tensor) -> None:
        config = self.config
        rate = optim.learning_rate(step, config.steps, config.learning_rate, config.optimizer)
        optim.set_learning_rate(self.optimizer, rate)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.task.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())

    def assert_is(self, folder: Path, model: torch.nn.Module, ineffective: str = "") -> None:
        """The losses, and the weights but for what has no effect: Adam scales up its rounding errors. A key's bias is
        such; `ineffective` is another."""
        curve = json.loads((folder / "curve.json").read_text())
        assert [point["loss"] for point in curve] == pytest.approx(self.losses, rel=1e-4)
        trained, _ = load_model(folder)
        for (name, ours), theirs in zip(trained.named_parameters(), model.parameters(), strict=True):
            keep = torch.ones(len(ours), dtype=torch.bool)
            if name.endswith("qkv.bias"):
                keep[len(ours) // 3 : 2 * len(ours) // 3] = False
            keep &= name != ineffective
            torch.testing.assert_close(ours[keep], theirs[keep], rtol=1e-3, atol=3e-5, msg=name)


def new_model(config: Pretrain, folder: Path) -> ViT:
    model = ViT(load_model(folder)[1].architecture)
    model.initialise(config.seed)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_mixed_images_train_on_mixed_labels(dataset, tmp_path, objective):
    config = configuration(
        objective=objective,
        augment="crop_flip",
        randaugment={"magnitude": 9.0},
        mixup=0.4,
        cutmix=1.0,
        label_smoothing=0.05,
    )
    loop.train(config, shards.open_dataset(dataset), tmp_path)
    model = new_model(config, tmp_path)
    reference = Reference(config, dataset, tmp_path, model)
    kinds = set()
    for step, images, labels, positions in reference.batches():
        images = randaugment(augment(images, "crop_flip", 0, positions), 2, 9.0, 0, positions)
        how = plan(0.4, 1.0, 0, step, 8, 8)
        assert how is not None
        kinds.add(how.box is None)
        images, targets = mix(images, labels, 3, how)
        logits = model(reference.inputs(images))
        if objective == "softmax":
            loss = functional.cross_entropy(logits, targets, label_smoothing=0.05)
        else:
            each = functional.binary_cross_entropy_with_logits(logits, 0.05 + 0.9 * targets, reduction="none")
            loss = each.sum(1).mean()
        reference.update(step, loss)
    assert kinds == {True, False}, "some steps are mixup, some CutMix"
    reference.assert_is(tmp_path, model)


@pytest.mark.slow
def test_a_patch_target_is_what_is_predicted(dataset, tmp_path):
    config = configuration(objective="masked_patches", patch_target="pixels")
    loop.train(config, shards.open_dataset(dataset), tmp_path)
    task = MaskedPatches(new_model(config, tmp_path), "pixels")
    reference = Reference(config, dataset, tmp_path, task)
    for step, images, _, positions in reference.batches():
        draws = torch.from_numpy(uniform(0, positions, 8, "masked patches")).view(16, 4, 2)
        reference.update(step, task(reference.inputs(images), images, draws))
    reference.assert_is(tmp_path, task.model)


def test_a_masked_autoencoder_is_trained_and_its_encoder_kept(dataset, tmp_path, capsys):
    """Its draws, its decoder's start and AdamW are those of a loop by hand; the log counts what it really takes."""
    config = configuration(**MAE, seed=3)
    metrics = loop.train(config, shards.open_dataset(dataset), tmp_path)
    options = MaeOptions(decoder_width=16, decoder_depth=1, decoder_heads=2)
    task = MaskedAutoencoder(new_model(config, tmp_path), options, seed=3)
    reference = Reference(config, dataset, tmp_path, task)
    for _, (step, images, _, positions) in zip(range(6), reference.batches(), strict=True):
        draws = torch.from_numpy(uniform(3, positions, 4, "masked autoencoder"))
        reference.update(step, task(reference.inputs(images), images, draws))
    reference.assert_is(tmp_path, task.model)
    trained, contract = load_model(tmp_path)
    assert (contract.class_names, contract.architecture.num_classes) == ((), 0)
    assert not [name for name in trained.state_dict() if "decoder" in name]
    flops = compute.train_flops(contract.architecture, options)
    assert metrics["exaflops"] == flops * 6 * 16 / 1e18
    said = capsys.readouterr().out
    assert f"{flops / 1e9:.4g} GFLOPs per image in training" in said


@pytest.mark.parametrize("kind", ["soft", "hard", "features"])
def test_a_student_sees_the_pixels_of_its_teacher_and_their_classes_by_name(dataset, tmp_path, kind, capsys):
    """The teacher has other means, more classes and another order; the student a distillation token."""
    teacher = ViT(ViTConfig(image_size=8, patch_size=4, width=24, depth=1, num_heads=2, mlp_dim=32, num_classes=4))
    with torch.no_grad():
        teacher.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    contract = contract_for(teacher.config, ("top", "bottom", "left", "right"), mean=(0.3,) * 3, std=(0.2,) * 3)
    save_model(tmp_path / "teacher", teacher, contract)
    settings = {"kind": kind, "weight": 0.3} | ({"temperature": 2.0} if kind == "soft" else {})
    config = configuration(
        objective="distillation",
        teacher="t",
        distillation=settings,
        mixup=0.4,
        label_smoothing=0.1,
        seed=3,
        model=DEEP | {"distillation": True},
    )
    init_from = ModelRef(tmp_path / "teacher", "t")
    metrics = loop.train(config, shards.open_dataset(dataset), tmp_path / "out", teacher=init_from)
    student = Student(new_model(config, tmp_path / "out"), 24 if kind == "features" else None, seed=3)
    reference = Reference(config, dataset, tmp_path / "out", student)
    for step, images, labels, _ in reference.batches():
        how = plan(0.4, 0.0, 3, step, 8, 8)
        assert how is not None
        images, targets = mix(images, labels, 3, how)
        with torch.no_grad():
            seen = normalise(images, contract.preprocessing, torch.float32)
            logits, features = teacher.eval()(seen)[:, [2, 3, 0]], teacher.forward_features(seen)[1]
        taught = features if kind == "features" else logits
        ours, answers = student(reference.inputs(images))
        supervised = functional.cross_entropy(ours, targets, label_smoothing=0.1)
        reference.update(
            step, 0.7 * supervised + 0.3 * imitation(kind, answers, taught, settings.get("temperature", 1))
        )
    reference.assert_is(tmp_path / "out", student.model)
    trained, contract = load_model(tmp_path / "out")
    assert contract.class_names == CLASSES
    assert not [name for name in trained.state_dict() if "projection" in name]
    flops = compute.train_flops(contract.architecture) + compute.forward_flops(teacher.config)
    assert metrics["exaflops"] == flops * 6 * 16 / 1e18
    assert f"{flops / 1e9:.4g} GFLOPs per image in training" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"class_names": ("left", "right", "up")},
            "teacher t does not know the classes 'top' of the data; its 3",
        ),
        ({"class_names": ("left", "left", "top"), "also": "right"}, "several classes with the same name"),
        (
            {"image_size": 12},
            "teacher t takes images of resolution 12, but this stage trains with resolution 8",
        ),
        ({"channels": 1}, "teacher t takes images with 1 channels, but the images of d have 3"),
        ({"class_names": ()}, "teacher t has no classifier, which distillation.kind hard imitates"),
    ],
    ids=str,
)
def test_a_teacher_that_does_not_fit_is_refused_before_the_first_step(dataset, tmp_path, changed, message):
    names = changed.get("class_names", CLASSES) + ((changed["also"],) if "also" in changed else ())
    side, channels = changed.get("image_size", 8), changed.get("channels", 3)
    shape = {"patch_size": 4, "width": 8, "depth": 1, "num_heads": 1, "mlp_dim": 8}
    model = ViT(ViTConfig(image_size=side, in_channels=channels, num_classes=len(names), **shape))
    save_model(tmp_path / "teacher", model, contract_for(model.config, names))
    config = configuration(objective="distillation", teacher="t")
    with pytest.raises(UserError, match=message):
        loop.train(config, shards.open_dataset(dataset), tmp_path / "out", teacher=ModelRef(tmp_path / "teacher", "t"))
    assert not (tmp_path / "out").exists()


def test_masked_patches_beside_labels_add_their_loss(dataset, tmp_path, capsys):
    """The loss is the labels' on whole images plus a weight times that of masked patches, in passes of their own."""
    fields = {"label_smoothing": 0.1, "mixup": 0.3, "patch_target": "4x4"}
    config = configuration(auxiliary={"masked_patches": 0.5}, **fields)
    metrics = loop.train(config, shards.open_dataset(dataset), tmp_path)
    model = new_model(config, tmp_path)
    patches = MaskedPatches(model, "4x4", beside_labels=True)
    reference = Reference(config, dataset, tmp_path, patches)
    for step, images, labels, positions in reference.batches():
        how = plan(0.3, 0.0, 0, step, 8, 8)
        assert how is not None
        images, targets = mix(images, labels, 3, how)
        inputs = reference.inputs(images)
        draws = torch.from_numpy(uniform(0, positions, 8, "masked patches")).view(16, 4, 2)
        supervised = functional.cross_entropy(model(inputs), targets, label_smoothing=0.1)
        reference.update(step, supervised + 0.5 * patches(inputs, images, draws))
    reference.assert_is(tmp_path, model)
    _, contract = load_model(tmp_path)
    assert contract.class_names == CLASSES
    flops = 2 * compute.train_flops(contract.architecture)
    assert metrics["exaflops"] == flops * 6 * 16 / 1e18
    assert f"{flops / 1e9:.4g} GFLOPs per image in training" in capsys.readouterr().out


def test_mocos_momentum_encoder_follows_what_deepspeed_trains(dataset, tmp_path):
    """A weight decay that shows: what is decayed but should not be, or the other way round, moves by 1 % a step."""
    config = configuration(**CONTRASTIVE | {"optimizer": {"weight_decay": 3.0}})
    metrics = loop.train(config, shards.open_dataset(dataset), tmp_path)
    assert "dev_accuracy" not in metrics
    task = MoCo(new_model(config, tmp_path), 24, 12, 0.3)
    momentum_encoder, reference = MomentumEncoder(task), Reference(config, dataset, tmp_path, task)
    projection = task.model.patch_embed.proj.weight.clone()
    for step, images, _, positions in reference.batches():
        one, other = map(reference.inputs, make_views(images, VIEWS, "resized_crop_flip", 0, positions))
        reference.update(step, task(one, other, *momentum_encoder.keys(one, other)))
        momentum_encoder.update(task, momentum(step, config.steps))
    # the projector's batch normalisation takes the mean away
    reference.assert_is(tmp_path, task.model, ineffective="norm.bias")
    trained, contract = load_model(tmp_path)
    assert torch.equal(trained.patch_embed.proj.weight, projection)
    assert (contract.class_names, contract.architecture.num_classes) == ((), 0)


@pytest.mark.slow
def test_moco_in_bfloat16_is_about_that_in_float32(dataset, tmp_path):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        config = configuration(**CONTRASTIVE | {"dtype": dtype, "learning_rate": 1e-4})
        loop.train(config, shards.open_dataset(dataset), tmp_path)
        losses[dtype] = [point["loss"] for point in json.loads((tmp_path / "curve.json").read_text())]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.03)
    assert losses["bfloat16"] != losses["float32"]


def test_an_evaluations_crop_is_the_recipes_or_the_backbones_or_follows_from_the_images(dataset, tmp_path):
    opened = shards.open_dataset(dataset)
    center = {"crop": "center", "crop_fraction": 0.875}
    loop.train(configuration(eval_crop=center, steps=1), shards.open_dataset(dataset), tmp_path)
    assert load_model(tmp_path)[1].preprocessing.model_dump().items() >= center.items()
    start = {"job": "finetune", "data": "d", "learning_rates": [0.1], "steps": 1, "batch_size": 2}

    def found(**fields: object) -> tuple[str, float]:
        config = Finetune.model_validate(start | fields)
        contract = make_task(config, opened, tmp_path if config.backbone else None).contract
        return contract.preprocessing.crop, contract.preprocessing.crop_fraction

    assert found(backbone="b") == ("center", 0.875)
    assert found(backbone="b", eval_crop={"crop": "squash"}) == ("squash", 1.0)
    assert found(model=DEEP, resolution=8) == ("squash", 1.0), "these images are square"
    assert found(model=DEEP, resolution=8, eval_crop=center) == ("center", 0.875)
