"""The state of a training in a checkpoint's files, for any number of workers."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pydantic import ConfigDict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipelines.store import Checkpoint, LogLine, Store, StoreDamaged, inside
from ray_jobs.training.engine import WEIGHTS, average_kinds
from ray_jobs.training.task import Evaluation
from ray_jobs.training.workers import Worker
from vit_model.fields import Frozen

_KEY = re.compile(r"(\w+)/([^@]+)@(\d+)")
STATE = "state"  # the key of the worker's JSON in a file's header


class WorkerState(Frozen):
    """The state of a worker besides its shards."""

    # A loss that is not finite only becomes an error at the next point of the curve.
    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")

    loader: dict[str, str | int]
    """the loader's state, the same for all workers"""
    points: tuple[dict[str, float | int | None], ...]
    """The curve so far, the same for all workers."""
    loss_sum: float
    summed: int
    """the number of losses in `loss_sum`, which are those since the last point"""
    substitutes: int = 0
    """in a fit, how many damaged images were replaced in this worker's shares so far"""
    evaluations: tuple[Evaluation, ...] = ()
    """the evaluations so far, in a trial that may stop early"""
    log: tuple[LogLine, ...] = ()
    """on the first worker, the lines of the log that may not be in the store"""


def worker_state(states: Sequence[WorkerState], worker: Worker) -> WorkerState:
    """Return the state that a worker continues from; more or fewer workers may have written the checkpoint."""
    if len(states) == worker.world:
        return states[worker.rank]
    damaged = sum(state.substitutes for state in states)
    mean = sum(state.loss_sum for state in states) / len(states)
    changes = {"loss_sum": mean, "substitutes": 0 if worker.rank else damaged}
    return states[0].model_copy(update=changes)


class _Part(NamedTuple):
    """Values of a parameter from `start` on, in a file under a key."""

    start: int
    size: int
    file: Any
    key: str


class TrainState:
    """The state in a checkpoint's files, for any number of workers.

    Raises:
        StoreDamaged: the files are not the parts of one state.
    """

    def __init__(self, store: Store, checkpoint: Checkpoint) -> None:
        self.step, self.attempt = checkpoint.step, checkpoint.attempt
        self._where = f"{store.uri}/{checkpoint.folder}"
        self.states: list[WorkerState] = []
        """the states of the workers that wrote the checkpoint, by rank"""
        self._parts: dict[tuple[str, str], list[_Part]] = defaultdict(list)
        folder = store.local(checkpoint.folder, checkpoint.files)
        for path in sorted(entry.path for entry in checkpoint.files):
            try:
                file = safe_open(inside(folder, path), framework="pt")
                self.states.append(WorkerState.model_validate_json(file.metadata()[STATE]))
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    kind, name, start = _KEY.fullmatch(key).groups()  # type: ignore[union-attr]
                    (size,) = file.get_slice(key).get_shape()
                    self._parts[kind, name].append(_Part(int(start), size, file, key))
            except (SafetensorError, AttributeError, KeyError, ValueError, TypeError) as error:
                raise self._damaged(f"{path} is not a part of a checkpoint ({error})") from None
        for (kind, name), parts in self._parts.items():
            ends = [0, *itertools.accumulate(part.size for part in sorted(parts))]
            if [part.start for part in sorted(parts)] != ends[:-1]:
                raise self._damaged(f"the parts of {kind} of {name} do not follow one another")

    def require(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Check that the state belongs to a module and its optimizer.

        Raises:
            StoreDamaged: it belongs to another architecture, or to another optimizer.
        """
        wanted: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for name, weight in module.named_parameters():
            for kind in (WEIGHTS, *(average_kinds(optimizer, weight) if weight.requires_grad else ())):
                wanted[kind][name] = weight.numel()
        for kind, sizes in wanted.items():
            saved = {name: sum(part.size for part in parts) for (k, name), parts in self._parts.items() if k == kind}
            different = sorted(name for name in sizes | saved if sizes.get(name) != saved.get(name))
            if different:
                name = different[0]
                raise self._damaged(
                    f"it has {saved.get(name, 'no')} values of {kind} of {name}, but this training needs "
                    f"{sizes.get(name, 'none')}"
                    + (f", and {len(different) - 1} others differ" if different[1:] else "")
                )

    def read(self, kind: str, name: str, start: int, count: int) -> Tensor:
        """Return `count` values from `start` on, float32 [count]."""
        values = torch.empty(count)
        for part in self._parts[kind, name]:
            low, high = max(start, part.start), min(start + count, part.start + part.size)
            if low < high:
                values[low - start : high - start] = part.file.get_slice(part.key)[low - part.start : high - part.start]
        return values

    def load(self, module: torch.nn.Module, *kinds: str, prefix: str = "") -> None:
        """Set all parameters of a module, each from the first of these kinds that the checkpoint has for it."""
        with torch.no_grad():
            for name, weight in module.named_parameters():
                kind = next(kind for kind in kinds if (kind, prefix + name) in self._parts)
                weight.copy_(self.read(kind, prefix + name, 0, weight.numel()).view_as(weight))

    def _damaged(self, problem: str) -> StoreDamaged:
        return StoreDamaged(
            f"the checkpoint {self._where} cannot be used: {problem}",
            "delete this folder to continue from an earlier checkpoint",
        )
