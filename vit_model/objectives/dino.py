"""DINO: self-distillation without labels (Caron et al. 2021, arXiv 2104.14294).

In: a ViT without a classifier; two global views of each image, and any number of smaller local ones. Out: a loss.
Use: `task = Dino(model)`; `teacher = Teacher(task)`; at each step `_, outputs = teacher(torch.cat(views[:2]))`,
`loss = task(teacher.targets(outputs, 0.04), *views)`, a step of the optimizer over `task`,
`teacher.update(task, momentum(step, steps, 0.996))` (`vit_model.objectives.momentum`) and
`teacher.recentre(outputs.mean(dim=0), 0.9)`. The pretrained model is the teacher's, as in the authors' evaluations.

The defaults follow the authors' code (facebookresearch/dino: main_dino.py, `DINOHead` in vision_transformer.py and
`MultiCropWrapper` in utils.py); docs/training.md has the rest of their recipe and the differences. Without labels, two
outputs minimise the loss that say nothing about an image: the same probability for all dimensions, which a low
temperature of the teacher (sharpening) prevents, and a single dimension for all images, which the centre prevents.
`measures` shows both, and `alarms` describes them.

Letters in shapes: b a worker's share of the batch, v views, d width, k outputs, c channels.
"""

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_model.model import ViT
from vit_model.objectives.losses import in_full, softmax_cross_entropy
from vit_model.objectives.momentum import MovingAverage
from vit_model.objectives.workers import mean_over_workers
from vit_model.parts import AroundModel, check_headless, empty_linear, generator_of
from vit_model.weights import resize_positions

INFORMATION, RANK = 0.001, 2.0
"""What a sound teacher has more of: the difference of the two entropies, and the effective rank of its features."""


def dino_loss(outputs: Tensor, taught: Tensor, temperature: float = 0.1) -> Tensor:
    """Return the mean of the cross-entropies over all pairs of a taught view and another view, in float32.

    Args:
        outputs: [v, b, k], the student's for all views, the taught ones first.
        taught: [2, b, k], the teacher's probabilities for the first two views.
        temperature: the divisor of the student's outputs.
    """
    both = taught.sum(dim=0)  # the cross-entropy is linear in its targets
    total = torch.zeros((), device=outputs.device)
    for view, output in enumerate(outputs):
        targets = taught[1 - view] if view < 2 else both
        total = total + softmax_cross_entropy(in_full(output) / temperature, targets)
    return total / (2 * (len(outputs) - 1))


def at_side(model: ViT, side: int) -> ViT:
    """Return a ViT with the same weights for square images of another size, whose gradients flow to `model`.

    Learned positions are resized by `ViTConfig.position_resize`. Raises UserError for relative positions.
    """
    if model.config.image_shape == (side, side):
        return model
    # Not a module of its own: blocks, which a checkpoint recomputes in the backward pass, are the model's.
    resized = copy.copy(model)
    resized.config = model.config.model_copy(update={"image_size": side})
    weights: dict[str, Any] = dict(model._parameters)
    resize_positions(weights, model.config, resized.config)
    resized._parameters = weights
    return resized


class Head(nn.Module):
    """Three layers, a projection to the unit sphere, and a linear layer whose rows have length 1.

    Weights start as in the authors' code: normal with std 0.02 and no bias; the last layer as nn.Linear.
    """

    def __init__(self, width: int, hidden_width: int, bottleneck_width: int, output_width: int, seed: int) -> None:
        super().__init__()
        generator = generator_of("DINO head", seed)
        sizes = itertools.pairwise((width, hidden_width, hidden_width, bottleneck_width))
        first, second, third = (empty_linear(*size) for size in sizes)
        for layer in (first, second, third):
            nn.init.trunc_normal_(layer.weight, std=0.02, generator=generator)
            nn.init.zeros_(layer.bias)
        self.mlp = nn.Sequential(first, nn.GELU(), second, nn.GELU(), third)
        self.last_layer = empty_linear(bottleneck_width, output_width, bias=False)
        bound = bottleneck_width**-0.5
        nn.init.uniform_(self.last_layer.weight, -bound, bound, generator=generator)

    def forward(self, features: Tensor) -> Tensor:
        """[b, d] -> [b, k], cosines."""
        directions = F.normalize(self.mlp(features), dim=1)
        return F.linear(directions, F.normalize(self.last_layer.weight, dim=1))


class Dino(AroundModel):
    """The trained module, the student: the ViT and its head.

    The last layer stays as it is for `frozen_steps` steps. Raises ValueError for a ViT that has a classifier.
    """

    def __init__(
        self,
        model: ViT,
        hidden_width: int = 2048,
        bottleneck_width: int = 256,
        output_width: int = 65536,
        temperature: float = 0.1,
        frozen_steps: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_headless(model.config)
        self.model = model
        self.projector = Head(model.config.width, hidden_width, bottleneck_width, output_width, seed)
        self.temperature, self.frozen_steps = temperature, frozen_steps

    def first_step(self, name: str) -> int:
        return self.frozen_steps if name.startswith("projector.last_layer.") else 0

    def forward(self, taught: Tensor, *inputs: Tensor) -> Tensor:
        """Return the loss, a scalar.

        Args:
            taught: [2 b, k], `Teacher.targets` of the first two views.
            inputs: the views [b, c, side, side]; then, with stochastic depth, for each of them the draws
                [b, blocks, 2], see `ViT.drop_path_factors`. Views of the same size are adjacent, and computed together.
        """
        views = [given for given in inputs if given.ndim == 4]
        draws = inputs[len(views) :]
        outputs = []
        for side in dict.fromkeys(view.shape[-1] for view in views):
            alike = [number for number, view in enumerate(views) if view.shape[-1] == side]
            images = torch.cat([views[number] for number in alike])
            depth = [torch.cat([draws[number] for number in alike])] if draws else []
            outputs.append(self.projector(at_side(self.model, side)(images, *depth)))
        by_view = torch.cat(outputs).view(len(views), len(views[0]), -1)
        return dino_loss(by_view, taught.view(2, len(views[0]), -1), self.temperature)


class Teacher(MovingAverage):
    """The moving average of the student, and the centre of its outputs [k]; without dropout and stochastic depth."""

    def __init__(self, task: Dino) -> None:
        super().__init__(task)
        self.eval()
        outputs = task.projector.last_layer.weight
        self.centre = nn.Parameter(torch.zeros(len(outputs), device=outputs.device), requires_grad=False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[b, c, height, width] -> the features [b, d] and the outputs [b, k]."""
        model, head = self.encoder
        features = model(images)
        return features, head(features)

    def targets(self, outputs: Tensor, temperature: float) -> Tensor:
        """Return the centred and sharpened probabilities [b, k] of outputs [b, k], in float32."""
        return ((in_full(outputs) - self.centre) / temperature).softmax(dim=1)

    @torch.no_grad()
    def recentre(self, mean: Tensor, kept: float) -> None:
        """Move the centre towards the mean [k] of a batch's outputs: `kept` of itself plus 1 - `kept` of the mean."""
        self.centre.lerp_(mean, 1 - kept)


@torch.no_grad()
def measures(features: Tensor, taught: Tensor) -> dict[str, float]:
    """Measure a collapse on the teacher's features [b, d] and probabilities [b, k]. All workers call this together.

    Returns:
        teacher_entropy: the mean entropy of an image's probabilities, 0 to 1 (all alike).
        mean_entropy: the entropy of the mean probabilities, 0 to 1.
        feature_rank: the effective rank of the features, 1 to d (RankMe, Garrido et al. 2023, arXiv 2210.02885): the
            exponential of the entropy of the singular values, which are taken from the second moments [d, d].
    """
    most = torch.tensor(float(taught.shape[1])).log()
    of_each = mean_over_workers(torch.special.entr(taught).sum(dim=1).mean())
    of_mean = torch.special.entr(mean_over_workers(taught.mean(dim=0))).sum()
    precise = features.double()
    moments = mean_over_workers(precise.T @ precise / len(precise))
    singular = torch.linalg.eigvalsh(moments).clamp(min=0).sqrt()
    rank = torch.special.entr(singular / singular.sum()).sum().exp()
    return {
        "teacher_entropy": (of_each.cpu() / most).item(),
        "mean_entropy": (of_mean.cpu() / most).item(),
        "feature_rank": rank.item(),
    }


def alarms(measured: dict[str, float]) -> dict[str, str]:
    """Return a sentence for each kind of collapse that `measures` shows.

    The difference of the entropies is the information that an output has about its image. Without sharpening it
    vanishes at an entropy of 1, without centring at 0 or between.
    """
    each, mean, rank = (measured[name] for name in ("teacher_entropy", "mean_entropy", "feature_rank"))
    found = {}
    if mean - each < INFORMATION and each > 0.9:
        found["uniform"] = (
            f"the teacher's outputs are nearly uniform for all images (entropy {each:.4f} of at most 1). While this"
            " lasts, nothing is learned; lower dino.teacher_temperature and dino.warmup_teacher_temperature"
        )
    elif mean - each < INFORMATION:
        found["constant"] = (
            f"the teacher's outputs are nearly the same for all images (entropy {each:.4f}, of their mean {mean:.4f})."
            " While this lasts, nothing is learned; lower dino.centre_momentum, so that the centre follows,"
            " or raise dino.momentum"
        )
    if rank < RANK:
        found["rank"] = (
            f"the features of all images are nearly the same (effective rank {rank:.2f}); lower learning_rate, or raise"
            " dino.momentum"
        )
    return found
