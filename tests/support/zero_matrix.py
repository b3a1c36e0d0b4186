"""Every engine against plain torch: weights after some steps, undisturbed and continued by other engines.

The reference (`expected_weights`) is a loop that uses nothing of `ray_jobs.training`. The model is a small ViT with
kernels that ZeRO-3 gathers when they are used, vectors that it keeps whole, and a frozen part, as MoCo's; in the module
of each objective.
"""

from __future__ import annotations

import atexit
import copy
import gc
import itertools
import json
import math
import os
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.spec import ModelSize, Pretrain, objective_properties
from ray_jobs.training import optim
from ray_jobs.training.engine import WEIGHTS, Engine, make_engine
from ray_jobs.training.methods import Method, make_method
from ray_jobs.training.model_ref import ModelRef
from tests.support.objectives import CASES as OBJECTIVES
from tests.support.vits import TINY, contract_for
from tests.support.workers import run_workers
from vit_model.config import ViTConfig
from vit_model.model import ViT
from vit_model.objectives import contrastive, workers
from vit_model.parts import ParameterGroups
from vit_model.weights import save_model

BATCH, STEPS, SAVED = 16, 6, 3
SCHEDULE = [0.2, 0.6, 1, 1, 0.6, 0.2]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"name": "sgd", "weight_decay": 0.1},
    "AdamW, averaged": {"weight_decay": 1e-4, "decay": "times_schedule", "layer_decay": 0.7, "ema": 0.5},
    "Muon": {"name": "muon", "weight_decay": 0.1},
    "Muon, averaged": {
        "name": "muon",
        "weight_decay": 1e-4,
        "decay": "times_schedule",
        "layer_decay": 0.7,
        "ema": 0.5,
    },
}
PEAK_RATES = {("SGD", True): 0.06, ("SGD", False): 0.01}
PEAK_RATE = 1e-3  # of the others
CLIP_NORM = 1.0  # the gradients' norm is about 6
_LAYERS_ABOVE = defaultdict(int, {"cls_token": 3, "pos_embed": 3, "patch_embed.proj": 3, "blocks.0": 2, "blocks.1": 1})
LIMITS = {"float32": 1e-6, "bfloat16": 5e-3}
"""The largest difference of a tensor, relative to its norm; in float32 on some CPUs more, see `Result.holds`."""
CHANGE_LIMITS = {"float32": 1e-4, "bfloat16": 0.1}
"""The difference of all weights, relative to how far training has moved them."""
MUON_LIMITS = {"float32": (2e-4, 0.03), "bfloat16": (5e-3, 0.2)}
"""Both for Muon, whose iterations round to bfloat16. The reference with its batch in four parts differs as much from
itself: 1.1e-4 and 0.018 in float32, 1.1e-3 and 0.16 in bfloat16. Without weight decay 0.077, with momentum 0.9 0.10."""

Weights = dict[str, Tensor]
State = dict[tuple[str, str], Tensor]


class Case(NamedTuple):
    """A way to train."""

    zero_stage: int
    dtype: str
    accumulation: int
    clips: bool
    optimizer: str
    workers: int
    objective: str = "softmax"


# One process is plain torch at every stage.
_WHERE = [(1, 1), (0, 2), (1, 2), (2, 2), (3, 2)]
CASES = [
    Case(stage, dtype, accumulation, clips, optimizer, workers)
    for (stage, workers), dtype, accumulation, clips, optimizer in itertools.product(
        _WHERE, ("float32", "bfloat16"), (1, 4), (True, False), ("AdamW", "SGD")
    )
]
CASES += [
    Case(stage, dtype, 1, True, "AdamW, averaged", workers)
    for (stage, workers), dtype in itertools.product(_WHERE, ("float32", "bfloat16"))
]
# In bfloat16, batch normalisation makes rounding differences large: the reference with the images in another order
# differs from itself by 0.02 of a tensor's norm.
CASES += [
    Case(1, "float32", 1, True, "SGD", 2, objective)
    for objective, case in OBJECTIVES.items()
    if case.properties.compares_images
]
CASES += [
    # DINO's teacher needs whole weights.
    Case(1 if objective == "dino" else 3, dtype, 4, True, optimizer, 2, objective)
    for objective, case in OBJECTIVES.items()
    if objective != "softmax" and not case.properties.compares_images
    for dtype, optimizer in (("float32", "SGD"), ("bfloat16", "AdamW"))
]
# ZeRO is refused with Muon.
CASES += [
    Case(0, dtype, accumulation, clips, "Muon", workers)
    for workers, dtype, accumulation, clips in itertools.product((1, 2), ("float32", "bfloat16"), (1, 4), (True, False))
]
CASES += [
    Case(0, dtype, 1, True, "Muon, averaged", workers)
    for workers, dtype in itertools.product((1, 2), ("float32", "bfloat16"))
]


class Result(NamedTuple):
    """The largest differences of a tensor's norm, relative to the norm."""

    case: Case
    difference: float
    """from the reference"""
    of_change: float
    """from the reference, all weights together, relative to how far training has moved them"""
    is_resumed_exactly: bool
    """whether a new engine that continues the same way from a save has the same weights to the bit"""
    is_guarded: bool
    """whether gradients that are not finite change no weight, and the norm tells"""
    resumed: dict[str, float]
    """from this case undisturbed, when others continue: {ZeRO stage and workers: difference}"""
    rounding: float
    """of the reference with its batch in eight parts from the reference; 0 in bfloat16 and if images are compared"""

    @property
    def holds(self) -> bool:
        """Whether the case gives the reference's weights, up to rounding, and continues exactly.

        AdamW enlarges rounding errors of small gradients. On an Intel Xeon with AMX, plain torch in eight parts is
        1.2e-6 from itself with clipping, and 4.5e-6 without; an engine may be twice as far.
        """
        worst = max(self.difference, *self.resumed.values())
        limits = max(LIMITS[self.case.dtype], 2 * self.rounding), CHANGE_LIMITS[self.case.dtype]
        if self.case.optimizer.startswith("Muon"):
            limits = MUON_LIMITS[self.case.dtype]
        is_near = worst <= limits[0] and self.of_change <= limits[1]
        return self.is_resumed_exactly and self.is_guarded and is_near


def measure(cases: Sequence[Case]) -> list[Result]:
    """Run all cases in one pair of processes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        run_workers(2, _worker, f"file://{folder}/store", cases, output)
        rows = json.loads(output.read_text())
    return [Result(Case(*case), *rest) for case, *rest in rows]


def _worker(rank: int, meeting: str, cases: Sequence[Case], output: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # DeepSpeed calls deprecated functions of torch
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    # needed several times for the model's 900,000 weights, as ours is for large models
    optim.BUCKET = 1 << 17
    # ZeRO-3 replaces functions of torch in the process, so the references come first.
    kinds = {(case.dtype, case.clips, case.optimizer, case.objective) for case in cases}
    expected = {kind: expected_weights(*kind) for kind in sorted(kinds)}
    rounding = {kind: _rounding(*kind, expected[kind]) for kind in sorted(kinds)}
    gc.freeze()  # what the libraries have loaded stays; each collection would look through it, for 0.4 s
    results = []
    for case in cases:
        kind = (case.dtype, case.clips, case.optimizer, case.objective)
        results.append(_result(case, expected[kind], rank)._replace(rounding=rounding[kind]))
        gc.collect()  # DeepSpeed's engines refer to themselves
    if rank == 0:
        output.write_text(json.dumps(results))
    dist.destroy_process_group()


def _result(case: Case, expected: Weights, rank: int) -> Result:
    method, module = make_task(case.objective, case.dtype)
    engine = make(case, module)
    train(engine, method, case, range(SAVED), rank)
    state = state_of(engine, case)
    train(engine, method, case, range(SAVED, STEPS), rank)
    weights = {name: values.clone() for name, values in engine.full_weights().items()}
    is_guarded = _is_guarded(engine, method, case, rank)
    again = continued(case, state, rank)
    others = [(1, 1), (case.zero_stage % 3 + 1, 2)] if case.workers == 2 else _WHERE[1:]
    if case.optimizer.startswith("Muon"):
        others = [(0, 3 - case.workers)]
    resumed = {}
    for stage, count in others:
        other = continued(case._replace(zero_stage=stage, workers=count), state, rank)
        resumed[where(stage, count)] = difference(other, weights)
    is_same = all(torch.equal(values, weights[name]) for name, values in again.items())
    change = of_change(weights, expected, case.objective)
    return Result(case, difference(weights, expected), change, is_same, is_guarded, resumed, 0.0)


def _is_guarded(engine: Engine, method: Method, case: Case, rank: int) -> bool:
    before = state_of(engine, case)
    share = [values.chunk(case.workers)[rank % case.workers] for values in batch(STEPS)]
    for number in range(case.accumulation):
        loss = loss_of(engine, method, *share)
        engine.backward(loss * math.inf if rank == number == 0 else loss)
    norm = engine.step(_peak(case))
    after = state_of(engine, case)
    is_told = norm is not None and not 0 <= float(norm) < math.inf
    return is_told and all(
        torch.equal(values, after[kind, name]) for (kind, name), values in before.items() if kind == WEIGHTS
    )


def where(stage: int, workers: int) -> str:
    return "one process" if workers == 1 else f"ZeRO-{stage}, {workers} workers"


def make_task(objective: str, dtype: str, seed: int = 0) -> tuple[Method, ParameterGroups]:
    """Return the method of an objective and its module.

    All weights are random: rounding errors count relative to them, and nothing begins with a gradient of zero.
    """
    case = Case(0, dtype, 1, True, "AdamW", 1, objective)
    config = configuration(case)
    labelled = objective_properties(config.objective).classifier is not None
    sizes = TINY | {"in_channels": 1, "width": 192, "num_heads": 3, "mlp_dim": 768}
    architecture = ViTConfig(**sizes, num_classes=3 * labelled)
    teacher = ModelRef(_teacher(), "teacher") if config.teacher else None
    method = make_method(config, contract_for(architecture), torch.device("cpu"), teacher)
    model, generator = ViT(architecture), torch.Generator().manual_seed(seed)
    module = method.module(model)
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    model.patch_embed.proj.requires_grad_(False)
    return method, module


@cache
def _teacher() -> Path:
    """Write another ViT, in float32."""
    folder = Path(tempfile.mkdtemp())
    _, module = make_task("softmax", "float32", seed=1)
    save_model(folder, cast(ViT, module), contract_for(cast(ViT, module).config))
    atexit.register(shutil.rmtree, folder)
    return folder


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pixels of a step over all workers, their labels, and their positions."""
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randint(256, (BATCH, 8, 8, 1), generator=generator, dtype=torch.uint8)
    return pixels, torch.arange(BATCH) % 3, torch.arange(step * BATCH, (step + 1) * BATCH)


def loss_of(network: Callable[..., Any], method: Method, pixels: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    """The loss of part of a batch, or of a whole batch in one of the two processes."""
    sides = zip(method.config.view_sides, itertools.cycle((pixels, pixels.flip(2))), strict=False)
    views = tuple(view[:, :side, :side] for side, view in sides)
    part = optim.MicroBatch(views, labels, positions.numpy())
    if len(pixels) < BATCH:
        return method.loss(network, part)
    with patch.object(workers, "world", lambda: 1), patch.object(contrastive, "rank", lambda: 0):
        return method.loss(network, part)


def _rounding(dtype: str, clips: bool, optimizer: str, objective: str, expected: Weights) -> float:
    if dtype != "float32" or OBJECTIVES[objective].properties.compares_images:
        return 0.0
    return difference(expected_weights(dtype, clips, optimizer, objective, parts=8), expected)


def expected_weights(dtype: str, clips: bool, optimizer: str, objective: str, parts: int = 1) -> Weights:
    """The reference: one process, the whole batch at once, float32 master weights, torch's own clipping."""
    method, masters = make_task(objective, dtype)
    working = copy.deepcopy(masters).to(getattr(torch, dtype))
    named = [(name, weight) for name, weight in masters.named_parameters() if weight.requires_grad]
    kernels = {f"{name}.weight" for name, module in masters.named_modules() if isinstance(module, torch.nn.Linear)}
    decays_all = objective == "contrastive"  # the authors hand all parameters to torch's AdamW
    settings, peak = OPTIMIZERS[optimizer], PEAK_RATES.get((optimizer, clips), PEAK_RATE)
    groups, momenta = [], {}
    for name, weight in named:
        scale = settings.get("layer_decay", 1.0) ** _LAYERS_ABOVE[".".join(name.split(".")[:2])]
        decay = settings["weight_decay"] * (name in kernels or decays_all)
        decay /= peak * scale if "decay" in settings else 1.0
        groups.append({"params": [weight], "weight_decay": decay, "times": scale})
        if settings.get("name") == "muon" and name in kernels and name.startswith("blocks."):
            momenta[weight] = torch.zeros_like(weight)
    torchs: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    if optimizer == "SGD":
        torchs = torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    averages = {name: weight.detach().clone() for name, weight in masters.named_parameters()}
    for step in range(STEPS):
        working.load_state_dict(masters.state_dict())
        working.zero_grad()
        for part in zip(*(values.chunk(parts) for values in batch(step)), strict=True):
            (loss_of(working, method, *part) / parts).backward()
        for master, rounded in zip(masters.parameters(), working.parameters(), strict=True):
            master.grad = None if rounded.grad is None else rounded.grad.float()
        if clips:
            torch.nn.utils.clip_grad_norm_(masters.parameters(), CLIP_NORM)
        for group in torchs.param_groups:
            group["lr"] = peak * SCHEDULE[step] * group["times"]
            if (weight := group["params"][0]) in momenta:
                muon_step(weight, momenta[weight], group["lr"], group["weight_decay"])
                weight.grad = None  # which AdamW skips
        torchs.step()
        decay = min(settings.get("ema", 0.0), (1 + step) / (10 + step))
        for name, weight in masters.named_parameters():
            averages[name] = decay * averages[name] + (1 - decay) * weight.detach()
    return averages


def muon_step(weight: Tensor, momentum: Tensor, rate: float, decay: float) -> None:
    """Muon (Jordan et al. 2024) with the factor of Liu et al. 2025; the iterations are in bfloat16, as torch's."""
    assert weight.grad is not None
    rows, columns = weight.shape
    momentum += 0.05 * (weight.grad - momentum)
    update = (0.05 * weight.grad + 0.95 * momentum).bfloat16()
    update = update.T if rows > columns else update
    update = update / update.norm()
    for _ in range(5):
        gram = update @ update.T
        # The sums are rounded once, as torch does.
        square = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        update = torch.addmm(update, square, update, beta=3.4445)
    update = update.T if rows > columns else update
    with torch.no_grad():
        weight *= 1 - rate * decay
        weight -= rate * 0.2 * math.sqrt(max(rows, columns)) * update


def configuration(case: Case) -> Pretrain:
    """The stage of a case."""
    return Pretrain.model_validate(
        {
            "job": "pretrain",
            "data": "none",
            "model": ModelSize(patch_size=4, width=192, depth=2, num_heads=3),
            "resolution": 8,
            "steps": STEPS,
            "batch_size": BATCH,
            "gradient_accumulation_steps": case.accumulation,
            "learning_rate": _peak(case),
            "optimizer": OPTIMIZERS[case.optimizer] | {"clip_norm": CLIP_NORM if case.clips else None},
            "dtype": case.dtype,
            "zero_stage": case.zero_stage,
            **OBJECTIVES[case.objective].fields,
        }
    )


def make(case: Case, module: ParameterGroups) -> Engine:
    """The engine of a case."""
    config = configuration(case)
    optimizer = optim.make_optimizer(module, config.optimizer, config.learning_rate)
    return make_engine(module, optimizer, config, case.workers)


def _peak(case: Case) -> float:
    return PEAK_RATES.get((case.optimizer, case.clips), PEAK_RATE)


def train(engine: Engine, method: Method, case: Case, steps: Iterable[int], rank: int) -> None:
    """Run these steps on this worker's share of the batches; without other workers on all of them."""
    for step in steps:
        share = [values.chunk(case.workers)[rank % case.workers] for values in batch(step)]
        for part in zip(*(values.chunk(case.accumulation) for values in share), strict=True):
            engine.backward(loss_of(engine, method, *part))
        engine.step(_peak(case) * SCHEDULE[step])


def state_of(engine: Engine, case: Case) -> State:
    """Put the shards of all workers together, flattened. Every value belongs to one worker."""
    own = [(shard.kind, shard.name, shard.start, shard.values.clone()) for shard in engine.state_shards()]
    everyone = [own]
    if case.workers > 1:
        everyone = [[] for _ in range(case.workers)]
        dist.all_gather_object(everyone, own)
    parts: dict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)
    for kind, name, start, values in itertools.chain(*everyone):
        parts[kind, name].append((start, values))
    state = {}
    for key, values in parts.items():
        values.sort(key=lambda part: part[0])
        ends = list(itertools.accumulate(len(part) for _, part in values))
        assert [start for start, _ in values] == [0, *ends[:-1]], key
        state[key] = torch.cat([part for _, part in values])
    return state


def continued(case: Case, state: State, rank: int) -> Weights:
    """Continue from a state with a new engine, and return the weights at the end."""
    method, module = make_task(case.objective, case.dtype)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(state[WEIGHTS, name].view_as(weight))
    engine = make(case, module)
    engine.load_state(lambda kind, name, start, count: state[kind, name][start : start + count], SAVED)
    train(engine, method, case, range(SAVED, STEPS), rank)
    return engine.full_weights()


def difference(weights: Weights, expected: Weights) -> float:
    """The largest difference of a tensor by norm, relative to its norm."""
    pairs = zip(_seen(weights).values(), _seen(expected).values(), strict=True)
    return max(((ours - wanted).norm() / wanted.norm()).item() for ours, wanted in pairs)


def of_change(weights: Weights, expected: Weights, objective: str) -> float:
    """The difference of all weights together by norm, relative to how far training has moved them."""
    start = {name: weight.detach() for name, weight in make_task(objective, "float32")[1].named_parameters()}
    ours, wanted, first = (
        torch.cat([*map(torch.flatten, _seen(values).values())]) for values in (weights, expected, start)
    )
    return ((ours - wanted).norm() / (wanted - first).norm()).item()


def _seen(weights: Weights) -> Weights:
    """Leave out a key's bias: it has no effect on the model, so AdamW scales up the rounding errors of its gradient."""
    return {
        name: torch.stack(values.chunk(3))[[0, 2]] if name.endswith("qkv.bias") else values
        for name, values in sorted(weights.items())
    }
