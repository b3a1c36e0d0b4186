"""A model of the store in another library's format, with its card.

In: a store and a model's manifest. Out: the files in a folder, and lines for the user: what the format does not keep,
and what was measured. `vitflow export` and `vitflow push` use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from pipelines.results.card import Facts, Format, facts_of, render
from pipelines.results.licences import license_to_publish
from pipelines.spec import LAST, RecipeError
from pipelines.store import Manifest, Store, model_folder
from vit_model.build import Network
from vit_model.contract import ModelContract
from vit_model.detection.detector import load_detector
from vit_model.errors import UserError
from vit_model.formats import hugging_face, npz, onnx, timm
from vit_model.formats.files import README
from vit_model.model import ViT
from vit_model.weights import load_model

GREY = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow makes images grey


class Model(NamedTuple):
    """A model to export, and what the store knows of it."""

    store: Store
    facts: Facts
    network: Network
    contract: ModelContract

    def licensed(self, stated: str | None) -> Model:
        """Return the model under the licence that it is published with; `stated`: by the user.

        Raises:
            RecipeError: a licence is unknown or forbids it.
        """
        chosen = license_to_publish(stated, self.contract.license, self.facts.origins)
        return self._replace(contract=self.contract.model_copy(update={"license": chosen}))

    def write(self, to: Format, folder: Path, place: str) -> list[str]:
        """Write the files and the card; return a line for each property that the format does not keep.

        Args:
            place: the folder's name or the hub's ORG/NAME, from which the card's code loads the model.

        Raises:
            RecipeError: the format does not support the model, or an extra is not installed.
        """
        network, contract, lines = self.network, self.contract, []
        if contract.mask_classes and to != "onnx":
            raise RecipeError(f"{self.facts.manifest.key[:12]} as {to}: the model classifies pixels; use --format onnx")
        is_grey = contract.preprocessing.channels == 1
        if to == "hf" and is_grey and isinstance(network, ViT) and network.config.stem is None:
            network, contract = in_colour(network, contract)
            lines = [
                "channels: the exported model takes RGB and makes it grey itself (ITU-R 601, without rounding to 8"
                " bits), because transformers.pipeline makes every image RGB"
            ]
        try:
            lines += write_files(to, folder, network, contract)
        except (UserError, ImportError) as error:
            raise RecipeError(f"{self.facts.manifest.key[:12]} as {to}: {error}") from None
        card = render(self.facts, contract, to, place, lines)
        (folder / README).write_text(card, encoding="utf-8")
        return lines

    def write_int8(self, folder: Path, place: str, max_drop: float) -> list[str]:
        """Write an ONNX file of 8-bit weights, and the card; return what was measured as lines.

        Raises:
            RecipeError: as `write`; or it is slower than float32, or less accurate by more than `max_drop` points.
        """
        with TemporaryDirectory() as temporary:
            fp32, small = (parent / "model.onnx" for parent in (Path(temporary), folder))
            self.write("onnx", fp32.parent, place)
            try:
                from pipelines.machine import int8
            except ImportError as error:
                raise RecipeError(f"--int8: {error}; for ONNX: pip install 'vitflow[onnx]'") from None
            int8.quantise(fp32, small)
            measured = int8.measure(self.store, self.facts.manifest, self.contract, (fp32, small), max_drop)
        card = render(self.facts, self.contract, "onnx", place, [], measured)
        (folder / README).write_text(card, encoding="utf-8")
        return measured


def write_detector(store: Store, manifest: Manifest, folder: Path, place: str) -> None:
    """Write a detector as ONNX, with its card; `place`: see `Model.write`.

    Raises:
        RecipeError: the extra is not installed. StoreDamaged: a file does not match its manifest.
    """
    detector, contract = load_detector(model_folder(store, manifest, LAST))
    try:
        onnx.write_detector(folder / "model.onnx", detector, contract)
    except (UserError, ImportError) as error:
        raise RecipeError(f"{manifest.key[:12]} as onnx: {error}") from None
    facts = facts_of(store, manifest, LAST)
    card = render(facts, contract.backbone, "onnx", place, [], detected=contract.class_names)
    (folder / README).write_text(card, encoding="utf-8")


def load(store: Store, manifest: Manifest, checkpoint: str) -> Model:
    """Load a model and collect what the store knows of it.

    Raises:
        RecipeError: the artifact does not have this checkpoint.
        StoreDamaged: a file does not match its manifest.
    """
    network, contract = load_model(model_folder(store, manifest, checkpoint))
    return Model(store, facts_of(store, manifest, checkpoint), network, contract)


def in_colour(model: ViT, contract: ModelContract) -> tuple[ViT, ModelContract]:
    """Return a model of grey images as one of RGB images, which has the same outputs for their grey."""
    config, pixels = model.config, contract.preprocessing
    coloured = config.model_copy(update={"in_channels": 3})
    weights = model.state_dict()
    kernel = weights["patch_embed.proj.weight"]
    shares = torch.tensor(GREY, dtype=kernel.dtype)[:, None]
    weights["patch_embed.proj.weight"] = (kernel[:, None] * shares).reshape(len(kernel), -1)
    network = ViT(coloured)
    network.load_state_dict(weights)
    fields = {"mean": pixels.mean * 3, "std": pixels.std * 3, "channels": 3}
    update = {"architecture": coloured, "preprocessing": pixels.model_copy(update=fields)}
    return network.eval(), contract.model_copy(update=update)


def write_files(to: Format, folder: Path, model: Network, contract: ModelContract) -> Iterator[str]:
    """Write the files of a format; yield a line for each property that the format does not keep.

    Raises:
        UserError: the format does not support the model.
    """
    if to == "onnx":
        onnx.write(folder / "model.onnx", model, contract)
        return  # the whole contract is in its metadata
    if to == "npz":
        yield from npz.write(folder / "model.npz", model, contract)
    elif not isinstance(model, ViT):
        raise UserError(f"--format {to} supports only ViTs, and this is a ResNet; npz and onnx support both")
    else:
        yield from (hugging_face if to == "hf" else timm).write(folder, model, contract)
    if contract.training_data != "unknown":
        yield f"training_data: the format has no field for the digest {contract.training_data[:12]} of that data"
    for name in ("dropout", "stochastic_depth"):
        if rate := getattr(contract.architecture, name, 0.0):
            yield f"{name}: the format has no field for {rate:g}, which matters only in training"
