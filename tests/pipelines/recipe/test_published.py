"""The recipes of published trainings: steps, images, operations and decay follow from what their sources say."""

from typing import Any, NamedTuple

import pytest
import torch
import yaml

from pipelines.recipe.load import load_pipeline, recipe_path
from pipelines.results.published import repetition
from pipelines.spec import Finetune, Import, Ingest, ModelSize, Pretrain
from pipelines.spec.published import published
from ray_jobs.reporting.provenance import same_protocol
from ray_jobs.training.optim import warmup_steps

IMAGENET = 1_281_167 * 0.99  # the first 99% of train (big_vision's train[:99%])
IMAGENET_21K = 3_467 * 4_096  # images per epoch, from the authors' steps per epoch


class Published(NamedTuple):
    """What a source says of a pretraining."""

    epochs: int
    images: float
    batch: int
    warmup_epochs: float | None
    """None: 10,000 steps"""
    rate: float
    decay: float
    """of the weights in a step with the peak rate"""
    model: tuple[int, int, int, int]
    """patch size, width, depth, classes"""
    passes: float = 1.0
    """operations, relative to a plain training of the encoder; 0: not compared"""


PAPER = Published(300, IMAGENET, 4096, None, 3e-3, 3e-3 * 0.3, (16, 768, 12, 1000))  # Table 3, ImageNet
PAPER_21K = Published(90, IMAGENET_21K, 4096, None, 1e-3, 1e-3 * 0.03, (16, 768, 12, 21841))  # the row above
# section 3 and appendix
AUGREG = Published(300, IMAGENET_21K, 4096, None, 1e-3, 1e-3 * 0.1, (16, 768, 12, 21841))
PUBLISHED = {
    ("imagenet_paper", "base@patch_size=16"): PAPER,
    ("imagenet_paper", "base@patch_size=32"): PAPER._replace(model=(32, 768, 12, 1000)),
    ("imagenet_paper", "large@patch_size=16"): PAPER._replace(model=(16, 1024, 24, 1000)),
    ("imagenet_paper", "large@patch_size=32"): PAPER._replace(model=(32, 1024, 24, 1000)),
    ("imagenet21k_paper", "base@patch_size=16"): PAPER_21K,
    ("imagenet21k_paper", "base@patch_size=32"): PAPER_21K._replace(model=(32, 768, 12, 21841)),
    ("imagenet21k_paper", "large@patch_size=16"): PAPER_21K._replace(model=(16, 1024, 24, 21841)),
    ("imagenet21k_paper", "large@patch_size=32"): PAPER_21K._replace(model=(32, 1024, 24, 21841)),
    ("augreg", "s16"): AUGREG._replace(decay=1e-3 * 0.03, model=(16, 384, 12, 21841)),
    ("augreg", "b32"): AUGREG._replace(model=(32, 768, 12, 21841)),
    ("augreg", "b16"): AUGREG,
    ("augreg", "r26_s32"): AUGREG._replace(model=(32, 384, 12, 21841), passes=0),  # its stem is a ResNet
    # vit_s16_i1k.py: wd=1e-4, multiplied by the schedule alone
    ("imagenet_s16", "pretrain"): Published(90, IMAGENET, 1024, None, 1e-3, 1e-4, (16, 384, 12, 1000)),
    # Table 8: blr 1.5e-4; the encoder sees a quarter of the patches
    ("mae", "pretrain"): Published(
        800, IMAGENET, 4096, 40, 1.5e-4 * 16, 1.5e-4 * 16 * 0.05, (16, 768, 12, 0), passes=1 / 1.80
    ),
    # DeiT's Table 9: 5e-4 x 1024 / 512
    ("deit", "teacher"): Published(300, IMAGENET, 1024, 5, 1e-3, 1e-3 * 0.05, (16, 768, 12, 1000)),
    ("deit", "pretrain"): Published(300, IMAGENET, 1024, 5, 1e-3, 1e-3 * 0.05, (16, 384, 12, 1000)),
    # CONFIG.md of the code; two views, each with a forward pass of the momentum encoder
    ("moco_v3", "pretrain"): Published(
        300, IMAGENET, 4096, 40, 1.5e-4 * 16, 1.5e-4 * 16 * 0.1, (16, 384, 12, 0), passes=8 / 3
    ),
}
RECIPES = sorted({recipe for recipe, _ in PUBLISHED})


def load(recipe: str) -> Any:
    raw = yaml.safe_load(recipe_path(recipe).read_text())
    ingests = [name for name, stage in raw["stages"].items() if stage["job"] == "ingest"]
    return load_pipeline(recipe, tuple(f"{name}.source.root=/archives" for name in ingests))


def test_every_pretraining_of_these_recipes_is_compared() -> None:
    found = {
        (recipe, name)
        for recipe in RECIPES
        for name, stage in load(recipe).stages.items()
        if isinstance(stage, Pretrain)
    }
    assert found == {*PUBLISHED}


@pytest.mark.parametrize(("recipe", "stage"), PUBLISHED)
def test_derived_numbers_are_the_sources(recipe: str, stage: str) -> None:
    config, published = load(recipe).stages[stage], PUBLISHED[recipe, stage]
    assert isinstance(config, Pretrain)
    images = published.epochs * published.images
    assert config.batch_size == published.batch
    assert config.steps * config.batch_size == pytest.approx(images, rel=1e-3)
    epoch = published.images / published.batch  # in steps
    warmup = 10_000 if published.warmup_epochs is None else published.warmup_epochs * epoch
    assert warmup_steps(config.optimizer, config.steps) == pytest.approx(warmup, rel=1e-3)
    assert config.learning_rate == pytest.approx(published.rate)
    peak = 1.0 if config.optimizer.decay == "times_schedule" else config.learning_rate
    assert config.optimizer.weight_decay * peak == pytest.approx(published.decay)


@pytest.mark.parametrize(("recipe", "stage"), [key for key, each in PUBLISHED.items() if each.passes])
def test_operations_are_those_of_the_published_model(recipe: str, stage: str) -> None:
    """Counted by hand: six operations per multiplication of the patches, the blocks and the head."""
    from ray_jobs.training.methods import make_method
    from tests.support.vits import contract_for

    config, published = load(recipe).stages[stage], PUBLISHED[recipe, stage]
    assert isinstance(config, Pretrain) and isinstance(config.model, ModelSize)
    patch, d, depth, classes = published.model
    patches = (224 // patch) ** 2
    tokens = patches + (config.model.pooling == "cls" or config.model.class_token) + config.model.distillation
    head = d * classes * (1 + config.model.distillation) + d * d * config.model.representation_head
    products = patches * 3 * patch**2 * d + depth * (tokens * (4 * d * d + 2 * d * 4 * d) + 2 * tokens**2 * d) + head
    contract = contract_for(config.model.architecture(224, 3, classes))
    if config.objective == "distillation":
        # the teacher's operations are not the model's
        config = config.model_copy(update={"objective": "softmax"})
    ours = make_method(config, contract, torch.device("cpu")).train_flops
    assert ours == pytest.approx(6 * products * published.passes, rel=0.01)


# what may be smaller: sizes, and the warm-up, as a share of fewer steps
SIZES = {"data", "resolution", "steps", "batch_size", "model", "optimizer"}
SIZES_OF_A_MODEL = {"patch_size", "width", "depth", "num_heads", "mlp_dim", "head_bias"}
WARMUP = {"warmup_steps", "warmup_fraction"}


@pytest.mark.parametrize(
    ("small", "recipe", "stage"),
    [
        ("paper", "imagenet_paper", "base@patch_size=16"),
        ("augreg", "augreg", "b16"),
        ("s16", "imagenet_s16", "pretrain"),
    ],
)
def test_scaled_down_trainings_differ_in_their_sizes_alone(small: str, recipe: str, stage: str) -> None:
    ours, published = load("published_small").stages[small], load(recipe).stages[stage]
    assert isinstance(ours, Pretrain) and isinstance(published, Pretrain)
    assert isinstance(ours.model, ModelSize) and isinstance(published.model, ModelSize)
    assert ours.model_dump(exclude=SIZES) == published.model_dump(exclude=SIZES)
    assert ours.model.model_dump(exclude=SIZES_OF_A_MODEL) == published.model.model_dump(exclude=SIZES_OF_A_MODEL)
    assert ours.optimizer.model_dump(exclude=WARMUP) == published.optimizer.model_dump(exclude=WARMUP)
    warmups = [warmup_steps(config.optimizer, config.steps) / config.steps for config in (ours, published)]
    assert warmups[0] == pytest.approx(warmups[1], abs=1 / ours.steps)  # a step is not divided


@pytest.mark.parametrize("name", published())
def test_a_repetition_does_what_the_numbers_source_does(name: str) -> None:
    """big_vision's transfer.py: shorter side 448, of it the middle 384, and 90, 98 or 99% of train, with one rate."""
    row = published()[name]
    stages = repetition(row, "/archives", f"/weights/{row.weights}", ()).stages
    stage, backbone = stages[row.stage], stages["backbone"]
    assert isinstance(stage, Finetune) and isinstance(backbone, Import)
    ingest = stages[stage.data]
    assert isinstance(ingest, Ingest)
    assert same_protocol(stage, ingest, backbone) == row
    if stage.augment == "squash_crop_flip":
        assert "cifar" in stage.data, "their resmall_crop is ours for square images alone"
    transfer = load_pipeline("paper_transfer", ("backbone.path=/weights.npz",)).stages[row.stage]
    assert isinstance(transfer, Finetune) and row.learning_rate in transfer.learning_rates
    assert same_protocol(transfer, ingest, backbone) is None, "it trains on all of train, as the paper does"
