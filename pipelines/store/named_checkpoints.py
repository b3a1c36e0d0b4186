"""Checkpoints of a finished pretraining: the weights that other stages and commands may name.

In: an artifact's manifest, and last, best or step:N. Out: a folder with that checkpoint's weights and contract.

A finished pretraining has its last weights in model.safetensors, the weights of earlier kept steps in
checkpoints/<step>/model.safetensors, and their list in checkpoints.json (`Kept`).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import ConfigDict, Field, model_validator

from pipelines.files.hashing import cache_folder
from pipelines.identity import sha256
from pipelines.spec import BEST, LAST, RecipeError, check_checkpoint, step_of
from pipelines.store.artifacts import local_file, local_files
from pipelines.store.objects import parse_record
from pipelines.store.protocol import Store
from pipelines.store.records import KEPT_WEIGHTS, Manifest
from vit_model.contract import CONTRACT_FILE, WEIGHTS_FILE, ModelContract
from vit_model.detection.contract import DetectorContract
from vit_model.fields import Frozen

CHECKPOINTS = "checkpoints.json"


class Kept(Frozen):
    """The content of checkpoints.json: the steps whose weights an artifact has, the last step included."""

    model_config = ConfigDict(extra="ignore")

    best: int | None
    steps: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _best_is_kept(self) -> Self:
        if self.best is not None and self.best not in self.steps:
            raise ValueError(f"best {self.best} is not one of the steps")
        return self


def model_folder(store: Store, manifest: Manifest, checkpoint: str = LAST) -> Path:
    """Return a local folder with the model.safetensors and config.json of a checkpoint; fetch only these files.

    Raises:
        RecipeError: the artifact does not have this checkpoint.
        StoreDamaged: a file is missing or does not match its entry.
    """
    weights = weights_file(store, manifest, checkpoint)
    files = [file for file in manifest.files if file.path in (weights, CONTRACT_FILE)]
    folder = local_files(store, manifest, files)
    if weights == WEIGHTS_FILE:
        return folder
    # A model is a folder with these two names, so link them: nothing may be added to the store.
    targets = {WEIGHTS_FILE: folder / weights, CONTRACT_FILE: folder / CONTRACT_FILE}
    linked = cache_folder() / "models" / sha256("\n".join(map(str, targets.values())))
    linked.mkdir(parents=True, exist_ok=True)
    for name, target in targets.items():
        with suppress(FileExistsError):  # made earlier, or by another process
            (linked / name).symlink_to(target)
    return linked


def contract_of(store: Store, manifest: Manifest) -> ModelContract | None:
    """Fetch and return the contract of a model or of a detector's backbone; None if the artifact has none.

    Raises:
        StoreDamaged: the file does not match its manifest, or is no contract.
    """
    if (path := local_file(store, manifest, CONTRACT_FILE)) is None:
        return None
    name, data = f"{manifest.folder}/{CONTRACT_FILE}", path.read_bytes()
    if manifest.kind == "detector":
        return parse_record(store, name, data, DetectorContract).backbone
    return parse_record(store, name, data, ModelContract)


def weights_file(store: Store, manifest: Manifest, checkpoint: str, where: str = "") -> str:
    """Return the path of a checkpoint's weights among an artifact's files.

    Raises:
        RecipeError: the artifact does not have it; the message begins with `where`.
    """
    try:
        check_checkpoint(checkpoint)
    except ValueError as error:
        raise RecipeError(f"{where}{error}") from None
    if checkpoint == LAST:
        return WEIGHTS_FILE
    model = f"{where}checkpoint {checkpoint}: {manifest.stage} ({manifest.job} {manifest.key[:12]})"
    if manifest.job != "pretrain":
        raise RecipeError(f"{model} is not a pretraining and has one set of weights")
    kept = kept_checkpoints(store, manifest)
    step = kept.best if checkpoint == BEST else step_of(checkpoint)
    if step is None:
        raise RecipeError(
            f"{model} has no best step, because its data has no dev split or an older version made it. Use last, or in"
            f" the second case rerun it with --force {manifest.stage}"
        )
    if step not in kept.steps:
        there = ", ".join(f"step:{step}" for step in kept.steps)
        raise RecipeError(
            f"{model} was made without it and has {there}. Use one of these, or rerun it with {step} in its keep_steps"
            f" and --force {manifest.stage}"
        )
    return WEIGHTS_FILE if step == kept.steps[-1] else f"{KEPT_WEIGHTS}{step}/{WEIGHTS_FILE}"


def kept_checkpoints(store: Store, manifest: Manifest) -> Kept:
    """Return the checkpoints of a finished pretraining; one from an early version has only the last."""
    if (path := local_file(store, manifest, CHECKPOINTS)) is None:
        return Kept(best=None, steps=(manifest.config["steps"],))
    return parse_record(store, f"{manifest.folder}/{CHECKPOINTS}", path.read_bytes(), Kept)
