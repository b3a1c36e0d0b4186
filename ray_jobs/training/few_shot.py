"""Few-shot accuracy on dev during a pretraining, as in the paper (section 4.1); only logged, never used to select.

In: the model so far. Out: {"5-shot dev": mean accuracy over the draws}. Solver and draws are the same as in the stage
evaluate (`ray_jobs.evaluation`), but labels are drawn from the pretraining's train split, and its dev split is scored.
No test image is read.
"""

from __future__ import annotations

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from pipelines.spec import FewShot
from pipelines.store import warn
from ray_jobs.data.shards import Dataset, Images
from ray_jobs.evaluation.linear_probe import leave_one_out
from ray_jobs.evaluation.supports import draw_labels
from ray_jobs.training.evaluators import Evaluator
from ray_jobs.training.workers import Worker
from vit_model.build import Network
from vit_model.contract import Preprocessing
from vit_model.errors import UserError

_BATCH = 256  # images per forward pass
# of shots * classes^2, which the solver's time is proportional to; a quarter is ImageNet with 25 shots
_LARGEST = 10**8


class FewShotProbe:
    """Scores the model during a training; each worker computes the features of a share of the images.

    Raises:
        UserError: the dataset has no dev split, or so many classes that the other workers would wait too long.
    """

    def __init__(
        self,
        config: FewShot,
        dataset: Dataset,
        preprocessing: Preprocessing,
        device: torch.device,
        worker: Worker,
    ) -> None:
        self._config, self._device, self._rank = config, device, worker.rank
        self._train, self._dev = dataset.labels("train"), dataset.labels("dev")
        if not len(self._dev):
            raise UserError(f"fewshot: dataset {dataset.info.name} has no dev split to score; leave fewshot out")
        classes, shots = len(dataset.info.class_names), max(config.shots)
        if shots * classes**2 > _LARGEST:
            raise UserError(
                f"fewshot: {shots} shots of {classes:,} classes take too long during a training; use fewer shots, or"
                " the stage evaluate"
            )
        # rows of train, per number of shots and draw
        self._draws = [
            [draw_labels(self._train, shots, config.seed, draw) for draw in range(config.draws)]
            for shots in config.shots
        ]
        self._needed = np.unique(np.concatenate([rows for of_shots in self._draws for rows in of_shots]))
        support, dev = (Images(dataset, dataset.index(split)) for split in ("train", "dev"))
        self._evaluators = [
            Evaluator(images, preprocessing, worker, _BATCH, is_kept=False)
            for images in (support.take(self._needed), dev)
        ]

    def score(self, model: Network) -> dict[str, float] | None:
        """Return the accuracies on rank 0, and None on the others; all workers call this together."""
        support, scored = (
            evaluator.gather(lambda images: model.forward_features(images)[1], self._device).numpy()
            for evaluator in self._evaluators
        )
        if self._rank:
            return None
        if not (np.isfinite(support).all() and np.isfinite(scored).all()):
            warn("fewshot: not measured at this step, because the features are not finite")
            return None
        accuracies: dict[str, float] = {}
        with threadpool_limits(1):
            for shots, of_shots in zip(self._config.shots, self._draws, strict=True):
                of_draws = []
                for rows in of_shots:
                    own = support[np.searchsorted(self._needed, rows)]
                    found = leave_one_out(own, self._train[rows], scored, True).predictions
                    of_draws.append(np.mean(found == self._dev))
                accuracies[f"{shots}-shot dev"] = float(np.mean(of_draws))
        return accuracies
