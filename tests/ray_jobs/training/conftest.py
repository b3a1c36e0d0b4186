"""A dataset to train on; and what a training changes in torch for the whole process is as before after each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.support import datasets


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey noise of 8x8 in three classes: 48 images to train on, 25 for dev. Some files have another by this name."""
    return datasets.put_noise(tmp_path_factory.mktemp("noise"), {"train": 48, "dev": 25, "test": 0})


@pytest.fixture(autouse=True)
def torch_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A training sets the number of threads, and DeepSpeed's ZeRO-3 puts its own `linear` in place of torch's."""
    monkeypatch.setattr(functional, "linear", functional.linear)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
