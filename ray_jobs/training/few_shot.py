"""Few-shot accuracy on dev while a pretraining runs, as in the paper (section 4.1); for its log, never to select.

In: the model so far. Out: {"5-shot dev": mean accuracy over the draws}. The solver and the draws are those of the stage
evaluate (`ray_jobs.evaluation`), but labels are drawn from the pretraining's own train split, and its dev split is
scored. No test image is read.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from pipelines.spec import FewShot
from pipelines.store import warn
from ray_jobs.data.shards import Dataset, Split
from ray_jobs.evaluation.linear_probe import leave_one_out
from ray_jobs.evaluation.supports import draw_labels
from vit_model.build import Network
from vit_model.contract import ModelContract
from vit_model.errors import UserError
from vit_model.preprocessing import normalise

_BATCH = 256  # images per forward pass
_LARGEST = (
    10**8
)  # shots * classes^2, with which the solver's time grows; ImageNet with 25 shots: a quarter of it


class FewShotProbe:
    """Scores the model of a training; each worker computes the features of a share of the images.

    Raises:
        UserError: the dataset has no dev split, or so many classes that the other workers would wait for too long.
    """

    def __init__(
        self,
        config: FewShot,
        dataset: Dataset,
        contract: ModelContract,
        device: torch.device,
        rank: int,
        world: int,
    ) -> None:
        self._config, self._dataset, self._contract = config, dataset, contract
        self._device, self._rank, self._world = device, rank, world
        self._train, self._dev = dataset.labels("train"), dataset.labels("dev")
        if not len(self._dev):
            raise UserError(
                f"fewshot: dataset {dataset.info.name} has no dev split to score; leave fewshot out"
            )
        classes, shots = len(dataset.info.class_names), max(config.shots)
        if shots * classes**2 > _LARGEST:
            raise UserError(
                f"fewshot: {shots} shots of {classes:,} classes take too long to solve during a training; use fewer"
                " shots, or the stage evaluate"
            )
        # rows of train for each number of shots and each draw
        self._draws = [
            [draw_labels(self._train, shots, config.seed, draw) for draw in range(config.draws)]
            for shots in config.shots
        ]
        self._needed = np.unique(np.concatenate([rows for of_shots in self._draws for rows in of_shots]))

    def score(self, model: Network) -> dict[str, float] | None:
        """Return the accuracies, on rank 0; None on the others, which call it, too."""
        support = self._features(model, "train", self._needed)
        scored = self._features(model, "dev", np.arange(len(self._dev)))
        if self._rank:
            return None
        if not (np.isfinite(support).all() and np.isfinite(scored).all()):
            warn("fewshot: not measured at this step, because the features are not finite")
            return None
        accuracies: dict[str, float] = {}
        with threadpool_limits(1):
            for shots, of_shots in zip(self._config.shots, self._draws, strict=True):
                right = [
                    np.mean(
                        leave_one_out(
                            support[np.searchsorted(self._needed, rows)], self._train[rows], scored, True
                        ).predictions
                        == self._dev
                    )
                    for rows in of_shots
                ]
                accuracies[f"{shots}-shot dev"] = float(np.mean(right))
        return accuracies

    def _features(self, model: Network, split: Split, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the features of these rows of a split, [n, width], on every worker."""
        share = math.ceil(len(rows) / self._world)
        # Rows past the end wrap around and are dropped, so that all shares have the same size.
        own = rows[np.arange(self._rank * share, (self._rank + 1) * share) % len(rows)]
        parts, preprocessing = [], self._contract.preprocessing
        with torch.inference_mode():
            for start in range(0, len(own), _BATCH):
                images = self._dataset.images(split, preprocessing, own[start : start + _BATCH])
                batch = torch.from_numpy(images).to(self._device)
                parts.append(model.forward_features(normalise(batch, preprocessing, torch.float32))[1])
        features = torch.cat(parts).float()
        if self._world > 1:
            shares = [torch.empty_like(features) for _ in range(self._world)]
            dist.all_gather(shares, features)
            features = torch.cat(shares)
        return features[: len(rows)].cpu().numpy()
