"""Continued pretraining: what is taken over from the start, bit for bit, and what starts anew."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import store as st
from pipelines.spec import ModelSize, Optimizer, Pretrain
from pipelines.store import open_store
from ray_jobs.data import shards
from ray_jobs.training import loop
from ray_jobs.training.contract import model_contract
from ray_jobs.training.methods import make_method
from ray_jobs.training.model_ref import ModelRef, find_model, make_contract, same_classes, take_over
from tests.support import datasets
from tests.support.interrupted import SIZE, configuration, run_attempt
from tests.support.objectives import MOCO
from tests.support.records import make_context, make_manifest
from tests.support.vits import randomised
from vit_model.blocks import resize_position_embedding
from vit_model.build import build
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.objectives.contrastive import MoCo
from vit_model.parts import HEADS
from vit_model.weights import load_model, save_model

CLASSES = ("a", "b", "c")
CPU = torch.device("cpu")
STILL: dict[str, Any] = {
    # a rate that no float32 weight notices
    "learning_rate": 1e-30,
    "optimizer": Optimizer(weight_decay=0.0),
    "steps": 2,
    "keep_steps": (),
    "augment": "none",
    "init_from": "first",
}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write(tmp_path / "dataset", CLASSES)


def write(folder: Path, classes: tuple[str, ...]) -> Path:
    """A dataset of grey noise of 8x8 in these classes, 24 images to train on."""
    return datasets.put_noise(folder, {"train": 24, "dev": 0, "test": 0}, classes)


def make_start(
    folder: Path, dataset: Path, classifier: bool = True, objective: str = "softmax", **model: Any
) -> ModelRef:
    """A model of that dataset whose weights, all of them, are random and not those of bfloat16."""
    size, info = ModelSize.model_validate(SIZE | model), shards.open_dataset(dataset).info
    contract = model_contract(size, 8, info, head="classes" if classifier else None)
    pixels = contract.preprocessing.model_copy(update={"mean": (0.25,), "std": (0.125,)})
    contract = contract.model_copy(update={"license": "mit", "preprocessing": pixels})
    save_model(folder, randomised(contract.architecture), contract)
    return ModelRef(folder, "first (pretrain 0123456789ab)", objective)


def train(config: Pretrain, dataset: Path, output: Path, init_from: ModelRef | None) -> tuple[ViT, ModelContract]:
    loop.train(config, shards.open_dataset(dataset), output, init_from=init_from)
    network, contract = load_model(output)
    assert isinstance(network, ViT)
    return network, contract


def encoder(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in network.state_dict().items() if not name.startswith(HEADS)}


@pytest.mark.parametrize(
    "zero_stage",
    [None, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)],
    ids=["one process", "ZeRO-1", "ZeRO-3"],
)
def test_training_in_bfloat16_starts_from_the_float32_weights(
    dataset: Path, tmp_path: Path, zero_stage: int | None
) -> None:
    """Steps too small to be seen give the same float32 weights back; rounded masters would be others."""
    init_from = make_start(tmp_path / "first", dataset)
    config, store = configuration(**STILL, zero_stage=zero_stage or 0), open_store(str(tmp_path / "store"))
    world = 1 if zero_stage is None else 2
    assert run_attempt(config, dataset, store, tmp_path / "more", world=world, init_from=init_from)
    first, more = (load_model(tmp_path / name)[0].state_dict() for name in ("first", "more"))
    torch.testing.assert_close(more, first, rtol=0, atol=0)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in first.values())


def test_another_objective_at_another_resolution_starts_from_the_encoder(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init_from, other = make_start(tmp_path / "first", dataset), {"objective": "masked_patches", "resolution": 16}
    more, contract = train(configuration(**STILL | other), dataset, tmp_path / "more", init_from)
    first, source = load_model(tmp_path / "first")
    expected = encoder(first) | {"pos_embed": resize_position_embedding(first.pos_embed, (2, 2), (4, 4), prefix=1)}
    torch.testing.assert_close(dict(more.state_dict()), expected, rtol=0, atol=0)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith(("starting", "pos_embed", "head", "pre_logits"))] == [
        "starting from the weights of first (pretrain 0123456789ab)",
        "pos_embed: resized from 2x2 to 4x4 patches",
        "head: the source's 3 classes were dropped",
    ]
    assert (contract.class_names, contract.license) == ((), "mit")
    assert contract.preprocessing == source.preprocessing.model_copy(update={"resolution": 16})
    assert contract.training_data == shards.open_dataset(dataset).info.content_digest


def test_the_momentum_encoder_starts_as_the_trained_one(dataset: Path, tmp_path: Path) -> None:
    init_from = make_start(tmp_path / "first", dataset)
    config = configuration(**STILL | MOCO)
    contract = make_contract(config, shards.open_dataset(dataset).info, init_from)
    method = make_method(config, contract, CPU)
    assert isinstance(loop.start(method, loop.ALONE, None, init_from).module, MoCo)
    averaged, _ = method.beside["momentum_encoder"].encoder
    torch.testing.assert_close(encoder(averaged), encoder(load_model(tmp_path / "first")[0]), rtol=0, atol=0)


def test_the_same_training_from_the_same_weights_is_the_same_bytes_and_another_start_is_not(
    dataset: Path, tmp_path: Path
) -> None:
    """The schedule begins at step 0 and the optimizer without averages: new weights in a file make no difference."""
    config = configuration(steps=4, keep_steps=(), dtype="float32", init_from="first")
    network, contract = build_new(config, dataset)
    save_model(tmp_path / "first", network, contract)
    train(config, dataset, tmp_path / "new", None)
    train(config, dataset, tmp_path / "continued", ModelRef(tmp_path / "first", "first"))
    train(config, dataset, tmp_path / "other", make_start(tmp_path / "random", dataset))
    new, continued, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("new", "continued", "other")
    )
    assert continued == new
    assert other["model.safetensors"] != new["model.safetensors"]
    rates = [[p["learning_rate"] for p in json.loads(files["curve.json"])] for files in (other, new)]
    assert rates[0] == rates[1]


def build_new(config: Pretrain, dataset: Path) -> tuple[Any, ModelContract]:
    """The weights that the seed gives."""
    assert config.model is not None
    contract = model_contract(config.model, config.resolution, shards.open_dataset(dataset).info)
    network = build(contract.architecture)
    network.initialise(config.seed)
    return network, contract


@pytest.mark.parametrize(
    ("classes", "fields", "started", "line"),
    [
        (("a", "b", "c"), {}, "softmax", "head: the source's 3 classes were kept"),
        (("c", "a", "b"), {}, "softmax", "head: the source's 3 classes were kept, in the model's order"),
        (("a", "b", "c"), {"objective": "sigmoid"}, "sigmoid", "head: the source's 3 classes were kept"),
        (("a", "b", "c"), {"objective": "sigmoid"}, "softmax", "head: newly initialised for 3 classes"),
        (("a", "b", "d"), {}, "softmax", "head: newly initialised for 3 classes"),
        (("a", "b"), {}, "softmax", "head: newly initialised for 2 classes"),
        (
            ("a", "b", "c"),
            {"model": SIZE | {"representation_head": True}},
            "softmax",
            "head: newly initialised for 3 classes",
        ),
    ],
)
def test_the_classifier_is_kept_for_the_same_classes_and_objective(
    dataset: Path, tmp_path: Path, classes: tuple[str, ...], fields: dict[str, Any], started: str, line: str
) -> None:
    init_from = make_start(tmp_path / "first", dataset, objective=started)
    info = shards.open_dataset(write(tmp_path / "other", classes)).info
    config = configuration(**STILL | fields)
    contract = make_contract(config, info, init_from)
    network = build(contract.architecture)
    network.initialise(0)
    assert take_over(network, contract, init_from, config.objective)[-1] == line
    first = load_model(tmp_path / "first")[0]
    if "kept" in line:
        rows = [CLASSES.index(name) for name in classes]
        assert torch.equal(network.head.weight, first.head.weight[rows])
        assert torch.equal(network.head.bias, first.head.bias[rows])
    else:
        assert not network.head.weight.count_nonzero()
    torch.testing.assert_close(encoder(network), encoder(first), rtol=0, atol=0)


def test_classes_with_one_name_are_told_apart_by_their_order_alone(dataset: Path) -> None:
    _, contract = build_new(configuration(), dataset)
    twice, turned = (contract.model_copy(update={"class_names": names}) for names in (("a", "b", "a"), ("a", "a", "b")))
    assert same_classes(twice, twice) == [0, 1, 2]
    assert same_classes(twice, turned) is None


def test_without_a_model_the_ancestors_is_taken(dataset: Path, tmp_path: Path) -> None:
    options = {"stochastic_depth": 0.1, "representation_head": True, "registers": 2, "gelu": "exact"}
    init_from, info = make_start(tmp_path / "first", dataset, **options), shards.open_dataset(dataset).info
    labelled = make_contract(configuration(init_from="first", model=None, resolution=16), info, init_from).architecture
    first = load_model(tmp_path / "first")[1].architecture
    assert labelled == first.model_copy(update={"image_size": 16})
    config = configuration(**MOCO, init_from="first", model=None)
    changed = {"num_classes": 0, "representation_head": False}
    assert make_contract(config, info, init_from).architecture == first.model_copy(update=changed)


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({"width": 32}, {}, r"init_from first \(pretrain \w+\) does not match model: width is 32 in the backbone, 16"),
        ({"patch_size": 8}, {"model": None, "resolution": 12}, r"resolution 12 is not a multiple of patch_size 8"),
        ({"pooling": "map"}, {"model": None, "objective": "masked_patches"}, r"does not train model\.pooling map"),
        (
            {"position": "relative"},
            {"model": SIZE | {"position": "relative"}, "resolution": 16},
            r"relative positions of a 2x2 grid have no counterpart on 4x4; keep the resolution",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused_before_the_first_step(
    dataset: Path, tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any], message: str
) -> None:
    init_from = make_start(tmp_path / "first", dataset, **theirs)
    with pytest.raises(ValueError, match=message):
        train(configuration(**STILL | ours), dataset, tmp_path / "more", init_from)
    assert not (tmp_path / "more").exists()


def test_the_stage_finds_its_ancestor_and_what_its_classifier_was_trained_with(dataset: Path, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    with store.staging(st.Layout.files("pretrain", "first", 1)) as staging:
        make_start(staging.path, dataset)
        make_start(staging.path / "checkpoints" / "5", dataset)
        (staging.path / "checkpoints.json").write_text('{"best": 5, "steps": [5, 40]}')
    manifest = make_manifest("pretrain", key="first", files=staging.files, config={"objective": "sigmoid"})
    config = configuration(init_from="first")
    found = find_model(make_context(store, config, init_from=manifest))
    assert found is not None and found.objective == "sigmoid" and "first" in found.name
    best = configuration(init_from={"stage": "first", "checkpoint": "best"})
    at_best = find_model(make_context(store, best, init_from=manifest))
    assert at_best is not None and at_best.folder != found.folder and at_best.name.endswith("best)")
    for without in (configuration(), configuration(init_from="latest")):
        assert find_model(make_context(store, without)) is None


def test_an_objective_adds_its_parts_anew(dataset: Path, tmp_path: Path) -> None:
    init_from = make_start(tmp_path / "first", dataset, classifier=False)
    config = configuration(**STILL, objective="masked_patches")
    contract = make_contract(config, shards.open_dataset(dataset).info, init_from)
    method = make_method(config, contract, CPU)
    engine = loop.start(method, loop.ALONE, None, init_from)
    fresh = method.module(build(contract.architecture))
    for name in ("mask_token", "head.weight", "head.bias"):
        assert torch.equal(engine.full_weights()[name], fresh.state_dict()[name])
