"""Training losses. In: logits and targets of a batch. Out: one float32 scalar, the mean over the batch."""

import torch.nn.functional as F
from torch import Tensor


def softmax_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean of -log softmax(logits)[label], for logits [b, classes] and int64 labels [b].

    With label smoothing s (Szegedy et al. 2016) the target is 1 - s + s / classes at the label, s / classes
    elsewhere. Computed in float32, because the sum over classes loses digits in bfloat16.
    """
    return F.cross_entropy(logits.float(), labels, label_smoothing=label_smoothing)
