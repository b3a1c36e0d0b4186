"""What every objective must do. The cases of `tests.support.objectives` are also killed and continued (test_resume.py),
and compared with plain torch in every engine (test_zero_matrix.py)."""

import json
import os
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from pipelines.identity import identity_fields
from pipelines.spec import ModelSize, Objective, Pretrain, objective_properties
from ray_jobs.data.shards import open_dataset
from ray_jobs.training import loop
from ray_jobs.training.methods import Method, make_method
from ray_jobs.training.model_ref import ModelRef
from ray_jobs.training.optim import MicroBatch
from tests.support.interrupted import SIZE, configuration, write_model
from tests.support.objectives import CASES
from tests.support.paths import ROOT
from tests.support.vits import contract_for
from tests.support.workers import run_workers
from vit_model.build import Network, build
from vit_model.weights import load_model

CPU = torch.device("cpu")
BATCH = 12


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> ModelRef:
    return write_model(tmp_path_factory.mktemp("teacher"), dataset, resolution=8)


def method_of(config: Pretrain, teacher: ModelRef) -> tuple[Method, Network]:
    assert isinstance(config.model, ModelSize)
    classes = 3 if objective_properties(config.objective).classifier else 0
    contract = contract_for(config.model.architecture(8, 1, classes))
    names = tuple("abc"[:classes])
    method = make_method(config, contract.model_copy(update={"class_names": names}), CPU, teacher)
    return method, build(contract.architecture)


def random_batch(method: Method) -> MicroBatch:
    """Random grey pixels in the views of the method, the first of the training."""
    sides, positions = method.config.view_sides, torch.arange(BATCH)
    views = tuple(torch.randint(256, (BATCH, side, side, 1), dtype=torch.uint8) for side in sides)
    return MicroBatch(views, positions % 3, positions.numpy())


def test_every_objective_has_a_case_and_a_row_in_the_docs() -> None:
    covered = {configuration(**case.fields).objective for case in CASES.values()}
    assert covered == {*get_args(Objective)}, "add a case to tests/support/objectives.py"
    table = (ROOT / "docs/models.md").read_text().partition("| `objective` of a pretraining |")[2]
    assert {*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)} >= covered, "add a row to docs/models.md"


@pytest.mark.parametrize("case", CASES)
def test_only_what_differs_from_labels_enters_the_key(case: str) -> None:
    plain, fields = configuration(), CASES[case].fields
    ours, theirs = identity_fields(configuration(**fields)), identity_fields(plain)
    assert {name for name in ours if ours[name] != theirs.get(name)} == fields.keys() - {"teacher"}
    assert {name for name in theirs if ours[name] != theirs[name]} <= {"augment"}


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].loss is not None])
def test_the_loss_is_what_is_computed_by_hand(case: str, teacher: ModelRef) -> None:
    method, model = method_of(configuration(**CASES[case].fields, dtype="float32"), teacher)
    module, by_hand = method.module(model), CASES[case].loss
    assert by_hand is not None
    batch = random_batch(method)
    ours = method.loss(module, batch)
    torch.testing.assert_close(ours, by_hand(module, tuple(map(method.inputs, batch.views))), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_operations_are_those_that_torch_counts(case: str, teacher: ModelRef) -> None:
    """The gradient by the pixels, which is not computed, is small in a deep model; the loss itself is not counted.

    The settings are the default ones, up to 1024, because the parts of a small case cost less than the tolerance. Only
    the size of views is the case's.
    """
    size = SIZE | {"width": 96, "depth": 4, "pooling": "gap"}
    fields, settings = dict(CASES[case].fields), CASES[case].properties.settings
    if settings is not None:
        usual = type(getattr(configuration(**fields), settings))().model_dump()
        small = {name: min(value, 1024) if isinstance(value, int) else value for name, value in usual.items()}
        fields[settings] = small | {name: fields[settings][name] for name in {"local_size"} & fields[settings].keys()}
    method, model = method_of(configuration(**fields, model=size, dtype="float32"), teacher)
    module = method.module(model)
    with FlopCounterMode(display=False) as counter:
        method.loss(module, random_batch(method)).backward()
    expected = pytest.approx(counter.get_total_flops(), rel=0.01)
    assert BATCH * method.train_flops == expected, "train_flops of the method"


@pytest.mark.parametrize("case", CASES)
def test_a_training_starts_from_another_model(case: str, dataset: Path, tmp_path: Path, teacher: ModelRef) -> None:
    """With a rate that no weight notices, what comes out is what it started from; parts of an objective are left."""
    fields = {"learning_rate": 1e-30, "optimizer": {"weight_decay": 0.0}, "steps": 2, "keep_steps": ()}
    config = configuration(**CASES[case].fields | fields, init_from="first", dtype="float32")
    imitated = teacher if config.teacher else None
    loop.train(config, open_dataset(dataset), tmp_path, init_from=teacher, teacher=imitated)
    started, ended = (load_model(folder)[0].state_dict() for folder in (teacher.folder, tmp_path))
    is_labelled = objective_properties(config.objective).classifier is not None
    assert ended.keys() == {name for name in started if is_labelled or not name.startswith("head.")}
    for name in ended:
        if not name.startswith("head."):
            assert torch.equal(ended[name], started[name]), name


def _worker(rank: int, folder: Path, configs: dict[str, Pretrain], dataset: Path, teacher: ModelRef) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    for case, config in configs.items():
        output = None if rank else folder / "two" / case
        imitated = teacher if config.teacher else None
        loop.train(config, open_dataset(dataset), output, loop.Worker(rank, 2, rank), teacher=imitated)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_workers_agree_with_one(dataset: Path, tmp_path: Path, teacher: ModelRef) -> None:
    """Mixed labels, keys of both workers' images, and the blocks that are left out for each image."""
    configs = {
        case: configuration(
            **fields | {"model": SIZE | {"stochastic_depth": 0.5}, "dtype": "float32", "steps": 6, "keep_steps": ()}
        )
        for case, (fields, *_) in CASES.items()
    }
    configs["mixed"] = configuration(
        mixup=0.4, cutmix=1.0, randaugment={"magnitude": 9.0}, dtype="float32", steps=6, keep_steps=()
    )
    run_workers(2, _worker, tmp_path, configs, dataset, teacher)
    for case, config in configs.items():
        imitated = teacher if config.teacher else None
        loop.train(config, open_dataset(dataset), tmp_path / "one" / case, teacher=imitated)
        curves = [json.loads((tmp_path / workers / case / "curve.json").read_text()) for workers in ("one", "two")]
        one, two = ([point["loss"] for point in curve] for curve in curves)
        assert two == pytest.approx(one, rel=1e-4), case
