"""What a training changes in torch for the whole process is as before after each test."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional


@pytest.fixture(autouse=True)
def torch_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A training sets the number of threads, and DeepSpeed's ZeRO-3 puts its own `linear` in place of torch's."""
    monkeypatch.setattr(functional, "linear", functional.linear)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
