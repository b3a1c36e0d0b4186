"""`vitflow verify-protocol`: does fine-tuning published weights give the published accuracy?

In: a row of `published.yaml`, an archive and a file of weights. Out: the pipeline that repeats the protocol, and
whether the mean over its refits is near enough.
"""

from __future__ import annotations

from typing import NamedTuple

from pipelines.recipe.load import load_pipeline
from pipelines.recipe.pipeline import Pipeline, base
from pipelines.spec import Finetune, RecipeError, nearest
from pipelines.spec.published import Published, published
from pipelines.store import Manifest

TOLERANCE = 0.3
"""The largest allowed difference between the mean and the published accuracy, in percentage points."""
SEEDS = 3
"""The minimum number of refits for a mean."""


class Verdict(NamedTuple):
    """A repetition's accuracy beside the published one, in % of the test images."""

    mean: float
    std: float
    """over the refits, with ddof 1"""
    seeds: int
    published: float

    @property
    def passes(self) -> bool:
        """Whether the mean is within TOLERANCE of the published accuracy."""
        return abs(self.mean - self.published) <= TOLERANCE + 1e-9  # a difference of 0.3 has a rounding error

    def __str__(self) -> str:
        verdict = "PASS" if self.passes else "FAIL"
        return (
            f"{verdict}: {self.mean:.2f}% (std {self.std:.2f} over {self.seeds} fine-tunings), published"
            f" {self.published:.2f}%: {self.mean - self.published:+.2f}, at most {TOLERANCE} allowed"
        )


def find_published(name: str) -> Published:
    """Return a row of the table. Raises RecipeError if the table does not have it."""
    table = published()
    if name not in table:
        raise RecipeError(f"unknown protocol {name!r}{nearest(name, table)}; known: {', '.join(table)}")
    return table[name]


def repetition(row: Published, archive: str, weights: str, changes: tuple[str, ...]) -> Pipeline:
    """Return the pipeline that repeats a protocol with one learning rate.

    Args:
        archive: the folder of the authors' archives.
        changes: STAGE.FIELD=VALUE, applied last.

    Raises:
        RecipeError: a change is invalid, or leaves fewer than SEEDS refits.
    """
    stage = load_pipeline(row.recipe, (f"backbone.path={weights}",)).stages[row.stage]
    (data,) = stage.inputs()["data"]
    given = (
        f"backbone.path={weights}",
        f"{data}.source.root={archive}",
        f"{base(row.stage)}.learning_rates=[{row.learning_rate}]",
        f"{base(row.stage)}.labels.use_dev=false",  # the held-out images were not trained on
    )
    pipeline = load_pipeline(row.recipe, (*given, *changes))
    repeated = pipeline.stages[row.stage]
    assert isinstance(repeated, Finetune)
    if repeated.refits < SEEDS:
        raise RecipeError(
            f"{base(row.stage)}.refits {repeated.refits}: a mean of at least {SEEDS} fine-tunings is compared"
        )
    return pipeline


def verdict(row: Published, manifest: Manifest, accuracy: float | None = None) -> Verdict:
    """Compare a repetition with its row, or with another published accuracy in %."""
    mean, std = (100 * float(manifest.metrics[name]) for name in ("test_accuracy", "test_accuracy_std"))
    refits = int(manifest.config["refits"])
    return Verdict(mean, std, refits, row.accuracy if accuracy is None else accuracy)
