"""The commands import, export and push: weights from and for other libraries."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from pipelines.commands.common import (
    DEFAULT_STORE,
    AddressOption,
    CheckpointOption,
    Commands,
    StoreOption,
    TokenOption,
    console,
    named_weights,
    new_folder,
    open_,
    say,
    store_option,
)
from pipelines.commands.running import Request, carry_out
from pipelines.files import hub
from pipelines.recipe.load import parse_pipeline, read_yaml
from pipelines.recipe.pipeline import pin, stage_name
from pipelines.spec import LAST, MEAN_AND_STD, Import, RecipeError

Format = Literal["hf", "timm", "npz", "onnx"]
ModelArgument = Annotated[str, typer.Argument(help="a model: its key, a unique key prefix, RUN/STAGE or @ALIAS")]


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
    name: Annotated[str | None, typer.Option(help="its name in lists; default: the name of its file")] = None,
    force: Annotated[bool, typer.Option("--force", help="import again even if cached")] = False,
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Import pretrained weights into the store."""
    stage = name or stage_name(path)
    setting = None if preprocessing is None else _read_preprocessing(preprocessing)
    config = {"job": "import", "path": path, "preprocessing": setting}
    pipeline = pin(parse_pipeline({"name": "import", "stages": {stage: config}}, "import"), (stage,))
    request = Request(pipeline, (stage,), (stage,) if force else ())
    [planned] = carry_out(request, store, address, token_file, verbose=True)
    assert planned.manifest is not None and isinstance(planned.config, Import)
    key = planned.manifest.key[:12]
    where = store_option(store)
    console.print(f"model [bold]{key}[/]; next:")
    if planned.manifest.metrics["classes"]:
        say(f"  vitflow predict {key} IMAGE...{where}")
    say(f"  vitflow init mine.yaml --images DIR --from {key}{where}")


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
    model: ModelArgument,
    to: Annotated[Format, typer.Option("--format", help="for transformers, timm, JAX or onnxruntime")],
    output: Annotated[Path, typer.Option(help="the folder to create")],
    checkpoint: CheckpointOption = LAST,
    int8: Annotated[
        bool,
        typer.Option("--int8", help="onnx: 8-bit weights, compared with float32; refused if slower or less accurate"),
    ] = False,
    max_drop: Annotated[
        float | None,
        typer.Option(metavar="POINTS", help="with --int8: the most that accuracy may fall; 1 if not given"),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Export a model for another framework, with a model card; a detector as ONNX."""
    if int8 and to != "onnx":
        raise RecipeError(f"--int8: vitflow writes no 8-bit weights as {to}; use --format onnx")
    if max_drop is not None and not int8:
        raise RecipeError("--max-drop is for 8-bit weights; give --int8 too")
    opened = open_(store, create=False)
    manifest = named_weights(opened, model)
    if manifest.kind == "detector" and (to != "onnx" or int8 or checkpoint != LAST):
        raise RecipeError(f"{model} is a detector, which --format onnx exports, without --int8 and --checkpoint")
    lines: list[str] = []
    with new_folder(output) as folder:
        exporting = _exporting()
        if manifest.kind == "detector":
            exporting.write_detector(opened, manifest, folder, output.name)
        elif int8:
            lines = exporting.load(opened, manifest, checkpoint).write_int8(
                folder, output.name, 1.0 if max_drop is None else max_drop
            )
        else:
            place = f"local-dir:{output.name}" if to == "timm" else output.name
            lines = exporting.load(opened, manifest, checkpoint).write(to, folder, place)
        names = sorted(path.name for path in folder.iterdir())
        for name in names:
            # safetensors makes files private to their owner
            (folder / name).chmod(folder.stat().st_mode & 0o666)
    for line in lines:
        say(line)
    say(f"wrote {output}: {', '.join(names)}")


@app.command("push")
def push(
    model: ModelArgument,
    target: Annotated[str, typer.Argument(metavar="hf:ORG/NAME", help="the repository; created if it is new")],
    to: Annotated[Literal["hf", "timm"], typer.Option("--format", help="for transformers or timm")] = "hf",
    license_: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="the licence that the model gets, such as apache-2.0"),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="visible to everybody; default: a private repository")
    ] = False,
    checkpoint: CheckpointOption = LAST,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Upload a model to the Hugging Face hub; needs HF_TOKEN."""
    repository = hub.pushable(target)
    opened = open_(store, create=False)
    loaded = _exporting().load(opened, named_weights(opened, model, ["model"]), checkpoint).licensed(license_)
    with TemporaryDirectory() as folder:
        lines = loaded.write(to, Path(folder), f"hf-hub:{repository}" if to == "timm" else repository)
        title = f"{loaded.facts.manifest.stage}, vitflow {loaded.facts.manifest.key[:12]}"
        is_private = hub.push(repository, Path(folder), title, is_public=public)
    for line in lines:
        say(line)
    say(f"pushed {target}: {'private' if is_private else 'public'}, license {loaded.contract.license}")
    if public and is_private:
        say("The repository existed and is private; to publish it, change its visibility on the hub.")


def _exporting() -> ModuleType:
    from pipelines.machine import export  # with torch

    return export
