"""Losses of classifiers. In: logits and labels of a batch. Out: one scalar, the mean over the batch.

Labels are int64 [b], or probabilities [b, classes] such as mixup's. Losses are computed in float32 or better, because
sums over many classes lose precision in bfloat16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax_cross_entropy(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, class_weights: Tensor | None = None
) -> Tensor:
    """Return the mean of -log softmax(logits)[label] for logits [b, classes]; probabilities weight all classes.

    With label smoothing s (Szegedy et al. 2016) the target is 1 - s + s / classes at the label, s / classes
    elsewhere: (1 - s) * p + s / classes for a probability p. `class_weights` [classes] multiply the terms of their
    classes; the mean is over the images. (torch divides by the sum of their labels' weights, so that an image's
    gradient would depend on the others of its batch.)
    """
    if class_weights is None:
        return F.cross_entropy(in_full(logits), labels, label_smoothing=label_smoothing)
    total = F.cross_entropy(in_full(logits), labels, class_weights, label_smoothing=label_smoothing, reduction="sum")
    return total / len(logits)


def sigmoid_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the binary cross-entropy of logits [b, classes], summed over classes, mean over the batch.

    The authors reduce it in the same way (big_vision, utils.py `sigmoid_xent`); a mean over classes would make the
    gradient `classes` times smaller. Start such a model with a `head_bias` far below zero (-10 in the authors' code),
    so that the many negative classes are right from the start.

    With label smoothing s the target is 1 - s at the label and s elsewhere, for any number of classes. So s should be
    small, such as 1e-4 for ImageNet.
    """
    if labels.is_floating_point():
        targets = label_smoothing + (1 - 2 * label_smoothing) * labels
    else:
        targets = torch.full_like(in_full(logits), label_smoothing)
        targets.scatter_(1, labels[:, None], 1 - label_smoothing)
    total = F.binary_cross_entropy_with_logits(in_full(logits), targets, reduction="sum")
    return total / len(logits)


CROSS_ENTROPIES = {"softmax": softmax_cross_entropy, "sigmoid": sigmoid_cross_entropy}


def in_full(numbers: Tensor) -> Tensor:
    """Convert to float32 unless the precision is already float32 or higher."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))
