"""Gradients, optimizer and float32 weights of a training: `Plain` torch, or DeepSpeed's ZeRO (`Zero`).

An engine wraps a module. Each step is `backward` for every micro-batch, then `step`:

    engine = make_engine(module, config, world)
    engine.backward(cross_entropy(engine(images), labels))
    norm = engine.step(rate)

The module that `make_engine` gets holds the float32 master weights; with bfloat16, a rounded copy computes the
gradients. The state that a checkpoint needs is a set of `StateShard`s: parts of a parameter's master weight or of one
of the optimizer's averages, each in exactly one worker. They do not depend on the number of workers or on the engine:
every engine can read the shards of every other (`load_state`).
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.spec import Pretrain
from ray_jobs.process import devices
from ray_jobs.training import optim

WEIGHTS = "weights"  # the kind of shards that are master weights; other kinds are averages
EMA = "ema"  # the kind that is the moving average of the weights


class StateShard(NamedTuple):
    """The values [start, start + n) of a flattened parameter (`WEIGHTS`), or of an average that belongs to it."""

    kind: str
    name: str
    start: int
    values: Tensor
    """float32 [n], a view of the engine's memory"""


Read = Callable[[str, str, int, int], Tensor]
"""(kind, parameter's name, start, length) -> the values in a checkpoint, float32 [length]"""


class Engine(Protocol):
    """What a training loop needs of an engine. All workers call the methods together."""

    module: Any
    """the module that computes the gradients, in the dtype of matrix products"""

    def __call__(self, *inputs: Tensor) -> Tensor: ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's loss, divided by the number of micro-batches in a step."""

    def step(self, rate: float) -> Tensor | float | None:
        """Average the gradients over all workers, clip them, update the weights with a learning rate.

        Nothing is updated if a gradient is not finite.

        Returns the global norm before clipping (not finite, or -1, if a gradient was not finite); None if not computed.
        """

    def full_weights(self) -> dict[str, Tensor]:
        """Return all master weights, or their moving averages (`Optimizer.ema`), gathered: float32 on the CPU.

        They may be views of the engine's memory, which its next step changes.
        """

    def state_shards(self) -> Iterator[StateShard]:
        """Yield this worker's part of the state. Every value belongs to one worker."""

    def load_state(self, read: Read, steps: int) -> None:
        """Take over the optimizer's averages after `steps` steps. The module was made with the checkpoint's weights."""


class Plain:
    """Torch without DeepSpeed: whole weights in every worker, gradients summed by one all-reduce.

    The weights that are stepped are float32, because small steps would round to nothing in bfloat16.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype,
        clip_norm: float | None,
        world: int = 1,
        accumulation: int = 1,
    ) -> None:
        self.masters, self.optimizer, self.dtype = module, optimizer, dtype
        self.module: Any = module if dtype == torch.float32 else copy.deepcopy(module).to(dtype)
        self.clip_norm, self.world, self.accumulation = clip_norm, world, accumulation
        named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        self._names, self._weights = [name for name, _ in named], [weight for _, weight in named]
        self._copies = [weight for weight in self.module.parameters() if weight.requires_grad]
        self._micro_batches = 0  # done in this step
        self._steps = 0
        if has_ema(optimizer):
            for weight in self._weights:
                _new_averages(optimizer, weight, self._steps)
        # The gradients are one buffer, so that a single all-reduce sums them.
        self._gradients = self._weights[0].new_zeros(sum(map(torch.numel, self._weights)))
        parts = self._gradients.split([weight.numel() for weight in self._weights])
        for weight, part in zip(self._weights, parts, strict=True):
            weight.grad = part.view_as(weight)

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation if self.accumulation > 1 else loss).backward()
        if self.module is not self.masters:
            for weight, rounded in zip(self._weights, self._copies, strict=True):
                assert weight.grad is not None and rounded.grad is not None
                if self._micro_batches:
                    weight.grad += rounded.grad
                else:
                    weight.grad.copy_(rounded.grad)
                rounded.grad = None
        self._micro_batches += 1

    def step(self, rate: float) -> Tensor:
        if self.world > 1:
            dist.all_reduce(self._gradients)
            self._gradients /= self.world
        norm = torch.nn.utils.clip_grad_norm_(self._weights, self.clip_norm or math.inf)
        optim.set_learning_rate(self.optimizer, rate, self._steps)
        # Fused optimizers of torch skip the step on the device where this is 1.
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        optim.step(self.optimizer)
        _update_ema(self.optimizer, self._weights, self._steps)
        self._steps += 1
        self._micro_batches = 0
        if self.module is self.masters:
            self._gradients.zero_()
        else:
            with torch.no_grad():
                torch._foreach_copy_([*self._copies], [*self._weights])
        return norm

    def full_weights(self) -> dict[str, Tensor]:
        state = self.optimizer.state
        return {name: state[weight].get(EMA, weight).detach().cpu() for name, weight in self.masters.named_parameters()}

    def state_shards(self) -> Iterator[StateShard]:
        """Yield this worker's equal share of the concatenated parameters: every worker has all of them."""
        total, rank = self._gradients.numel(), dist.get_rank() if self.world > 1 else 0
        first, last = total * rank // self.world, total * (rank + 1) // self.world
        ends = itertools.accumulate(weight.numel() for weight in self._weights)
        for name, weight, end in zip(self._names, self._weights, ends, strict=True):
            begin = end - weight.numel()
            low, high = max(first, begin) - begin, min(last, end) - begin
            if low < high:
                averages = _averages(self.optimizer, weight)
                for kind, values in {WEIGHTS: weight.detach(), **averages}.items():
                    yield StateShard(kind, name, low, values.flatten()[low:high])
        if rank == 0:
            for name, weight in self.masters.named_parameters():
                if not weight.requires_grad:
                    yield StateShard(WEIGHTS, name, 0, weight.flatten())

    def load_state(self, read: Read, steps: int) -> None:
        self._steps = steps
        for name, weight in zip(self._names, self._weights, strict=True):
            for kind, values in _new_averages(self.optimizer, weight, steps).items():
                values.copy_(read(kind, name, 0, values.numel()).view_as(values))


class Zero:
    """DeepSpeed's ZeRO, stages 1 to 3: the workers share the master weights and the optimizer's averages."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> None:
        whole = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        deepspeed = devices.import_deepspeed()
        with contextlib.redirect_stdout(io.StringIO()):  # some of its optimizers print the machine's memory
            self._engine, *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=settings, dist_init_required=False
            )
        self.module, self._zero = self._engine.module, self._engine.optimizer
        self._frozen = {name: whole[name] for name, weight in module.named_parameters() if not weight.requires_grad}
        # DeepSpeed takes its master weights from the module after rounding it to bfloat16.
        with torch.no_grad():
            for name, start, flat, place in self._shares():
                flat[place].copy_(whole[name].flatten()[start : start + place.stop - place.start])
        self._partitions = [*{flat: None for _, _, flat, _ in self._shares()}]
        self._steps = 0
        if has_ema(optimizer):
            for flat in self._partitions:
                _new_averages(self._zero.optimizer, flat, self._steps)

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self._engine(*inputs)

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # only counts the micro-batch

    def step(self, rate: float) -> Tensor | float | None:
        optim.set_learning_rate(self._zero, rate, self._steps)
        self._engine.step()
        _update_ema(self._zero.optimizer, self._partitions, self._steps)
        self._steps += 1
        return self._engine.get_global_grad_norm()

    def full_weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        weights = dict(self._frozen)
        if has_ema(self._zero.optimizer):
            return weights | self._full_averages()
        for name, weight in self.module.named_parameters():
            if name not in weights:
                weights[name] = safe_get_full_fp32_param(weight).detach().cpu().clone()
        return weights

    def _full_averages(self) -> dict[str, Tensor]:
        named = [(name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad]
        whole = {
            name: torch.zeros(getattr(weight, "ds_shape", weight.shape), device=weight.device) for name, weight in named
        }
        for name, start, flat, place in self._shares():
            part = self._zero.optimizer.state[flat][EMA][place]
            whole[name].view(-1)[start : start + len(part)] = part
        for values in whole.values():
            dist.all_reduce(values)  # every value is zero on all workers but one
        return {name: values.cpu() for name, values in whole.items()}

    def state_shards(self) -> Iterator[StateShard]:
        for name, start, flat, place in self._shares():
            for kind, values in {WEIGHTS: flat.detach(), **_averages(self._zero.optimizer, flat)}.items():
                yield StateShard(kind, name, start, values[place])
        if dist.get_rank() == 0:
            for name, weight in self._frozen.items():
                yield StateShard(WEIGHTS, name, 0, weight.flatten())

    def load_state(self, read: Read, steps: int) -> None:
        self._steps = steps
        new = {flat: _new_averages(self._zero.optimizer, flat, steps) for flat in self._partitions}
        for name, start, flat, place in self._shares():
            for kind, values in new[flat].items():
                values[place].copy_(read(kind, name, start, place.stop - place.start))

    def _shares(self) -> Iterator[tuple[str, int, Tensor, slice]]:
        """Yield (name, start, partition, place): the parameter's flattened values from `start` are at that slice.

        A partition is a flat tensor of master weights, for which the optimizer keeps averages of the same shape.
        """
        for name, weight in self.module.named_parameters():
            if not weight.requires_grad:
                continue
            if hasattr(weight, "ds_id"):  # stage 3 divides every parameter
                group, offset, count = self._zero.grad_position[self._zero.get_param_id(weight)]
                start = dist.get_rank() * count
                count = min(count, weight.ds_numel - start)  # the rest is padding
                flat = self._zero.fp32_partitioned_groups_flat[group]
            elif weight._hp_mapping is not None:  # stages 1 and 2 divide groups of parameters
                mapping = weight._hp_mapping
                (flat,) = self._zero.optimizer.param_groups[mapping.param_group_index]["params"]
                start, offset = mapping.lp_fragment_address.start, mapping.hp_fragment_address.start
                count = mapping.hp_fragment_address.numel
            else:
                continue
            if count > 0:
                yield name, start, flat, slice(offset, offset + count)


def make_engine(module: torch.nn.Module, optimizer: torch.optim.Optimizer, config: Pretrain, world: int) -> Engine:
    """Return the engine of a pretraining: ZeRO if there is something to divide, otherwise plain torch.

    The module has the float32 weights to start from and is on its device. The optimizer steps its parameters and has
    learning rate 0; only its `average_kinds` are saved.

    Raises:
        UserError: the workers cannot share a micro-batch evenly.
    """
    dtype = devices.torch_dtype(config.dtype, next(module.parameters()).device)
    settings = optim.deepspeed_config(config, world)
    if world == 1 or config.zero_stage == 0:
        steps = config.gradient_accumulation_steps
        return Plain(module, optimizer, dtype, config.optimizer.clip_norm, world, steps)
    return Zero(module, optimizer, settings)


def has_ema(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's weights are averaged (`Optimizer.ema`)."""
    return optimizer.param_groups[0].get(EMA) is not None


def _update_ema(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], step: int) -> None:
    """Move the averages of these weights, if they are kept, after step number `step`, counted from 0."""
    if has_ema(optimizer):
        decay = min(optimizer.param_groups[0][EMA], (1 + step) / (10 + step))
        averages = [optimizer.state[weight][EMA] for weight in weights]
        torch._foreach_lerp_(averages, [weight.detach() for weight in weights], 1 - decay)


def average_kinds(optimizer: torch.optim.Optimizer, weight: Tensor) -> tuple[str, ...]:
    """Return the names of the averages that are kept for a weight, including the average of the weight itself."""
    return (*optim.average_kinds(optimizer, weight), *((EMA,) if has_ema(optimizer) else ()))


def _averages(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Tensor]:
    """Return the averages that the optimizer keeps for a weight."""
    return {kind: optimizer.state[weight][kind] for kind in average_kinds(optimizer, weight)}


def _new_averages(optimizer: torch.optim.Optimizer, weight: Tensor, steps: int) -> dict[str, Tensor]:
    """Set up the optimizer's averages as after `steps` steps, and return them to be filled.

    They are zeros; the average of the weight starts as the weight.
    """
    averages = {kind: torch.zeros_like(weight, requires_grad=False) for kind in average_kinds(optimizer, weight)}
    if EMA in averages:
        averages[EMA].copy_(weight.detach())
    optimizer.state[weight] = dict(averages)
    if "exp_avg" in averages:
        # as fused AdamW keeps it
        optimizer.state[weight]["step"] = torch.tensor(float(steps), device=weight.device)
    return averages
