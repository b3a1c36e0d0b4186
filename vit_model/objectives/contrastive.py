"""Contrastive pretraining: MoCo v3 for Vision Transformers (Chen, Xie and He 2021, arXiv 2104.02057).

In: a ViT without a classifier and two views of each image. Out: a loss.
Use: `task = MoCo(model)`; `momentum_encoder = MomentumEncoder(task)`; at each step
`loss = task(one, other, *momentum_encoder.keys(one, other))`, a step of the optimizer over `task`, and
`momentum_encoder.update(task, momentum(step, steps))` (`vit_model.objectives.momentum`); the pretrained model is
`task.model`.

The defaults follow the authors' code (facebookresearch/moco-v3: moco/builder.py, main_moco.py and the commands
for ViTs in CONFIG.md); docs/training.md has the rest of their recipe and the differences. The module works in one
process and in the workers of torch.distributed's default group, which share the batch equally: the mean of their losses
is the loss of the whole batch in one process.

Letters in shapes: b a worker's share of the batch, B the whole batch, d width, c channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_model.model import ViT
from vit_model.objectives.losses import in_full
from vit_model.objectives.momentum import MovingAverage
from vit_model.objectives.workers import gather, projector, rank
from vit_model.parts import AroundModel, check_headless


def info_nce(queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """Return 2 T times the mean of -log softmax(cos(query, keys) / T) at each query's positive key, in float32.

    `queries` [b, d] belong to this worker, `keys` [B, d] to all workers in the order of their ranks. The factor 2 T,
    which the authors took from BYOL, makes the best learning rate nearly independent of T.
    """
    cosines = F.normalize(in_full(queries), dim=1) @ F.normalize(in_full(keys), dim=1).T  # [b, B]
    own = torch.arange(len(queries), device=queries.device) + rank() * len(queries)
    return 2 * temperature * F.cross_entropy(cosines / temperature, own)


class MoCo(AroundModel):
    """The trained module: the ViT, followed by a projector and a predictor.

    The patch projection keeps its random weights, because training it makes ViTs unstable (section 4.3). The authors'
    ViTs have `position` "sincos2d_moco", and their AdamW decays every trained parameter. The projector and predictor
    are initialised with `seed` as nn.Linear does, and the ViT by `ViT.initialise`; the authors draw the patch
    projection from a uniform distribution (Xavier) and not from a LeCun normal.
    Raises ValueError for a ViT that has a classifier.
    """

    def __init__(
        self,
        model: ViT,
        hidden_width: int = 4096,
        output_width: int = 256,
        temperature: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_headless(model.config)
        model.patch_embed.proj.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        self.model = model
        self.projector = projector((model.config.width, hidden_width, hidden_width, output_width), generator)
        self.predictor = projector((output_width, hidden_width, output_width), generator)
        self.temperature = temperature

    def is_decayed(self, name: str) -> bool:
        """Return true: the authors hand all parameters to torch's AdamW."""
        return True

    def forward(
        self,
        one: Tensor,
        other: Tensor,
        keys_of_one: Tensor,
        keys_of_other: Tensor,
        draws_of_one: Tensor | None = None,
        draws_of_other: Tensor | None = None,
    ) -> Tensor:
        """Return the symmetrised loss, a scalar, of two views [b, c, height, width] of the same images.

        Args:
            keys_of_one, keys_of_other: [B, d], the keys of all workers' views.
            draws_of_one, draws_of_other: [b, blocks, 2], see `ViT.drop_path_factors`.
        """
        first, second = (
            info_nce(self.predictor(self.projector(self.model(view, draws))), keys, self.temperature)
            for view, keys, draws in (
                (one, keys_of_other, draws_of_one),
                (other, keys_of_one, draws_of_other),
            )
        )
        return first + second


class MomentumEncoder(MovingAverage):
    """The moving average that gives the keys."""

    @torch.no_grad()
    def keys(
        self,
        one: Tensor,
        other: Tensor,
        draws_of_one: Tensor | None = None,
        draws_of_other: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the keys [B, d] of all workers' views [b, c, height, width]. All workers call this together.

        The draws may be the same as in `MoCo.forward`: a query is compared with keys of the other view only, so two
        compared outputs never share draws.
        """
        model, projector = self.encoder
        return gather(projector(model(one, draws_of_one))), gather(projector(model(other, draws_of_other)))
