"""The commands import and export: weights from and for other libraries."""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pipelines.commands.common import (
    DEFAULT_STORE,
    AddressOption,
    CheckpointOption,
    Commands,
    StoreOption,
    TokenOption,
    console,
    open_,
    say,
)
from pipelines.commands.running import carry_out
from pipelines.recipe.load import parse_pipeline, read_yaml
from pipelines.recipe.pipeline import pin, stage_name
from pipelines.results.lookup import find_artifact
from pipelines.spec import LAST, MEAN_AND_STD, Import, RecipeError
from pipelines.store import model_folder
from vit_model.errors import UserError

if TYPE_CHECKING:
    from vit_model.build import Network
    from vit_model.contract import ModelContract

Format = Literal["hf", "timm", "npz", "onnx"]


app = Commands()


@app.command("import")
def import_(
    path: Annotated[
        str,
        typer.Argument(
            # escaped, because rich would read the brackets as markup
            help="Google's .npz, timm's or other safetensors, a Hugging Face folder; a local path, s3://... or "
            "hf:ORG/NAME\\[@REVISION]"
        ),
    ],
    preprocessing: Annotated[
        str | None,
        typer.Option(
            metavar="half|imagenet|FILE",
            help="mean and std of the images, if the weights do not state them; FILE: YAML with mean and std, and "
            "optionally interpolation, crop and crop_fraction",
        ),
    ] = None,
    averages: Annotated[
        bool,
        typer.Option(
            "--averages/--raw",
            help="if a checkpoint has both: take the weights' moving averages, or the weights",
        ),
    ] = True,
    name: Annotated[str | None, typer.Option(help="its name in lists; default: the name of its file")] = None,
    force: Annotated[bool, typer.Option("--force", help="import again even if cached")] = False,
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Import pretrained weights into the store."""
    stage = name or stage_name(path)
    setting = None if preprocessing is None else _read_preprocessing(preprocessing)
    config = {"job": "import", "path": path, "preprocessing": setting, "averages": averages}
    pipeline = pin(parse_pipeline({"name": "import", "stages": {stage: config}}, "import"), (stage,))
    forced = (stage,) if force else ()
    [planned] = carry_out(pipeline, (stage,), store, address, token_file, forced, verbose=True)
    assert planned.manifest is not None and isinstance(planned.config, Import)
    key, path_option = planned.manifest.key[:12], shlex.quote(f"backbone.path={planned.config.path}")
    console.print(f"model [bold]{key}[/]; next:")
    if planned.manifest.metrics["classes"]:
        console.print(f"  vitflow predict {key} IMAGE...")
    value = setting if setting is None or isinstance(setting, str) else json.dumps(setting)
    more = "" if value is None else f" --set {shlex.quote(f'backbone.preprocessing={value}')}"
    more += "" if averages else " --set backbone.averages=false"
    say(f"  vitflow run finetune_imported --set images.source.root=DIR --set {path_option}{more}")


def _read_preprocessing(preprocessing: str) -> Any:
    """Return the name of a known mean and std, or the content of the file with this name."""
    if preprocessing in MEAN_AND_STD:
        return preprocessing
    if not Path(preprocessing).is_file():
        raise RecipeError(
            f"--preprocessing {preprocessing}: unknown value; expected {', '.join(MEAN_AND_STD)} or a file "
            "with mean and std, as in mean: [0.5, 0.5, 0.5]"
        )
    return read_yaml(Path(preprocessing))


@app.command("export")
def export(
    model: Annotated[str, typer.Argument(help="a model: its key, a unique key prefix, or RUN/STAGE")],
    to: Annotated[Format, typer.Option("--format", help="for transformers, timm, JAX or onnxruntime")],
    output: Annotated[Path, typer.Option(help="the folder to create")],
    checkpoint: CheckpointOption = LAST,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Export a model for another framework."""
    opened = open_(store, create=False)
    manifest = find_artifact(opened, model, "model")
    source = model_folder(opened, manifest, checkpoint)
    with _new_folder(output) as folder:
        from vit_model.weights import load_model

        try:
            lines = list(_write(to, folder, *load_model(source)))
        # the format does not support the model, or an extra is not installed
        except (UserError, ImportError) as error:
            raise RecipeError(f"{manifest.key[:12]} as {to}: {error}") from None
        names = sorted(path.name for path in folder.iterdir())
        for name in names:
            (folder / name).chmod(
                folder.stat().st_mode & 0o666
            )  # safetensors makes files private to their owner
    for line in lines:
        say(line)
    say(f"wrote {output}: {', '.join(names)}")


def _write(to: Format, folder: Path, model: Network, contract: ModelContract) -> Iterator[str]:
    """Write the files of a format; yield a line for each property that the format does not keep.

    Raises:
        UserError: the format does not support the model.
    """
    from vit_model.formats import files, hugging_face, npz, onnx, timm
    from vit_model.model import ViT

    if to == "onnx":
        onnx.write(folder / "model.onnx", model, contract)
        files.write_readme(folder, contract)
        return  # the whole contract is in its metadata
    if to == "npz":
        yield from npz.write(folder / "model.npz", model, contract)
        files.write_readme(folder, contract)
    elif not isinstance(model, ViT):
        raise UserError(f"--format {to} supports only ViTs, and this is a ResNet; npz and onnx support both")
    else:
        yield from (hugging_face if to == "hf" else timm).write(folder, model, contract)
    if contract.training_data != "unknown":
        yield f"training_data: the format has no field for the digest {contract.training_data[:12]} of that data"
    for name in ("dropout", "stochastic_depth"):
        if rate := getattr(contract.architecture, name, 0.0):
            yield f"{name}: the format has no field for {rate:g}, which matters only in training"


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder, which gets the name `output` if the block succeeds and is removed otherwise.

    Raises:
        RecipeError: `output` exists, or cannot be written.
    """
    taken = f"--output {output}: already exists; use a new name or an empty folder"
    if output.is_symlink() or (output.exists() and not (output.is_dir() and not any(output.iterdir()))):
        raise RecipeError(taken)
    if not output.parent.is_dir():
        raise RecipeError(f"--output {output}: {output.parent} is not a folder")
    temporary = output.parent / f".{output.name}.{secrets.token_hex(8)}.tmp"
    try:
        temporary.mkdir()
        yield temporary
        temporary.rename(output)  # replaces an empty folder, and nothing else
    except OSError as error:
        raise RecipeError(f"--output {output}: cannot write to it: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
