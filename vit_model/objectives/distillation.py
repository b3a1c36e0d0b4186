"""Distillation: a student learns from a frozen teacher's answers beside the labels (Hinton et al. 2015; DeiT).

In: a model to train, another one, and a batch of images. Out: the two parts of the loss.
Use: `student = Student(model)`; `teacher = Teacher(network, preprocessing, "hard", classes)`; at each step
`logits, answers = student(images)`, then `(1 - w) * softmax_cross_entropy(logits, labels) + w * imitation("hard",
answers, teacher.answers(pixels))`; the pretrained model is `student.model`.

A ViT with a distillation token answers the teacher with this token's classifier, as in DeiT (Touvron et al. 2021, arXiv
2012.12877, facebookresearch/deit); every other model with the classifier that also learns the labels. At evaluation the
logits are the mean of both classifiers.

Letters in shapes: b batch, d width, t the teacher's width, c channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_model.build import Network
from vit_model.contract import Preprocessing
from vit_model.model import ViT
from vit_model.objectives.losses import in_full
from vit_model.parts import AroundModel, empty_linear, generator_of, lecun_normal_
from vit_model.preprocessing import normalise

Kind = Literal["soft", "hard", "features"]


def imitation(kind: Kind, answers: Tensor, taught: Tensor, temperature: float = 1.0) -> Tensor:
    """Return how far a student's answers [b, n] are from a teacher's, a scalar in float32, the mean over the batch.

    - soft: T^2 KL(softmax(teacher / T) || softmax(student / T)), summed over the classes (Hinton et al. 2015; DeiT's
      equation 2). DeiT's code also divides by the number of classes, which its paper does not.
    - hard: the cross-entropy with the teacher's most likely class (DeiT's equation 3).
    - features: half the squared distance (FitNets, Romero et al. 2015) of the two vectors, each scaled to length 1, so
      that their scales do not matter. This is 1 - cosine.
    """
    ours, theirs = in_full(answers), in_full(taught)
    if kind == "hard":
        return F.cross_entropy(ours, theirs.argmax(dim=1))
    if kind == "features":
        return (1 - F.cosine_similarity(ours, theirs, dim=1)).mean()
    ours, theirs = ((logits / temperature).log_softmax(dim=1) for logits in (ours, theirs))
    return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


class Student(AroundModel):
    """The trained module: a classifier, and with `teacher_width` a linear map of its representation to the teacher's.

    The map (FitNets' regressor) is drawn from a LeCun normal distribution with `seed`, and discarded after training.
    """

    def __init__(self, model: Network, teacher_width: int | None = None, seed: int = 0) -> None:
        super().__init__()
        self.model = model
        self.projection: nn.Linear | None = None
        if teacher_width is None:
            return
        device = next(model.parameters()).device
        self.projection = empty_linear(model.config.width, teacher_width, device=device)
        with torch.no_grad():
            drawn = torch.empty(self.projection.weight.shape, device="cpu")
            lecun_normal_(drawn, generator_of("projection", seed))
            self.projection.weight.copy_(drawn)
            self.projection.bias.zero_()

    def forward(self, images: Tensor, drop_path_draws: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """[b, c, height, width] -> in training (logits [b, classes] for the labels, outputs for the teacher).

        The outputs for the teacher are logits (the distillation token's or the classifier's) or the projected
        representation [b, t]. Evaluation returns the model's logits. `drop_path_draws`: see `ViT.drop_path_factors`.
        """
        if not self.training:
            logits: Tensor = self.model(images)
            return logits
        representation, distilled = _read(self.model, images, drop_path_draws)
        if self.projection is not None:
            return _classify(self.model, representation, distilled), self.projection(representation)
        if isinstance(self.model, ViT) and distilled is not None:
            return self.model.head(representation), self.model.head_dist(distilled)
        logits = _classify(self.model, representation, distilled)
        return logits, logits


class Teacher:
    """A frozen model in evaluation mode, on its device and in its dtype, outside the trained module.

    Args:
        kind: "features" for its representations, the others for its logits.
        classes: for each class of the student, its number in the teacher's classifier; None for features.
    """

    def __init__(
        self, model: Network, preprocessing: Preprocessing, kind: Kind, classes: Sequence[int] | None = None
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self.preprocessing, self.kind = preprocessing, kind
        self._dtype = next(model.parameters()).dtype
        self._classes: Tensor | None = None
        if kind != "features":
            assert classes is not None
            self._classes = torch.tensor(classes, device=next(model.parameters()).device)

    @torch.no_grad()
    def answers(self, pixels: Tensor) -> Tensor:
        """Return the answers to images before normalisation, uint8 [b, height, width, c], which it normalises itself.

        They are logits [b, classes] in the student's order, or representations [b, t].
        """
        images = normalise(pixels, self.preprocessing, self._dtype)
        if self._classes is None:
            return _read(self.model, images)[0]
        logits: Tensor = self.model(images)
        return logits[:, self._classes]


def _read(model: Network, images: Tensor, drop_path_draws: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return `ViT.read` for a ViT; a ResNet's representation and None."""
    if isinstance(model, ViT):
        return model.read(images, drop_path_draws)
    return model.forward_features(images)[1], None


def _classify(model: Network, representation: Tensor, distilled: Tensor | None) -> Tensor:
    if isinstance(model, ViT):
        return model.classify(representation, distilled)
    logits: Tensor = model.head(representation)
    return logits
