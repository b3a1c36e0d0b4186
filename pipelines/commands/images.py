"""The commands init and predict, for your own images."""

from __future__ import annotations

import stat
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.commands.common import (
    DEFAULT_STORE,
    CheckpointOption,
    Commands,
    JsonOption,
    StoreOption,
    console,
    errors,
    open_,
    plain,
    print_json,
)
from pipelines.results.lookup import find_artifact
from pipelines.spec import LAST, RecipeError
from pipelines.store import model_folder
from vit_model.errors import UserError

app = Commands()


@app.command("init")
def init(
    file: Annotated[Path, typer.Argument(help="the recipe to write")],
    images: Annotated[
        Path,
        typer.Option(
            help="class folders, train/val/test folders, or a folder with metadata.csv or .jsonl; or a zip or tar of it"
        ),
    ],
    source: Annotated[
        str,
        typer.Option(
            help="the kind of source with --images as its root, or its fields: '{kind: cifar, classes: 100}'"
        ),
    ] = "folder",
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="WEIGHTS...",
            help="pretrained weights to start from, or several to compare: each as `vitflow import` takes it, or a"
            " model of the store",
        ),
    ] = None,
    others: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="weights")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write a recipe for your images, with a model that fits them and this machine.

    Few images start from pretrained weights: those of --from, or the newest that `vitflow import` has put into the
    store. With --from A.npz B_folder hf:ORG/NAME, the recipe compares these weights.
    """
    if others and not weights:
        raise RecipeError(f"unexpected argument {others[0]!r}; weights follow --from")
    from pipelines.machine.init import write_recipe  # with torch, and readers of images

    write_recipe(file, images, source, [*(weights or ()), *(others or ())], store, console)


@app.command("predict")
def predict(
    model: Annotated[str, typer.Argument(help="a model: its key, a unique key prefix, or RUN/STAGE")],
    images: Annotated[list[Path], typer.Argument(help="image files, or folders with images at any depth")],
    checkpoint: CheckpointOption = LAST,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Classify images with a model from the store; print the five likeliest classes of each.

    Files and folders that cannot be read are named on stderr. The others are still classified, and the exit code is 1.
    """
    opened = open_(store, create=False)
    manifest = find_artifact(opened, model, "model")
    files: dict[Path, None] = {}  # each once
    unreadable: list[dict[str, Any]] = []
    for path in images:
        try:
            files |= dict.fromkeys(_image_files(path))
        except RecipeError as error:
            unreadable.append({"image": str(path), "error": str(error)})
    if not files:
        raise RecipeError("\n".join(row["error"] for row in unreadable))
    from vit_model.predict import classify_readable

    rows = []
    try:
        folder = model_folder(opened, manifest, checkpoint)
        for row in chain(unreadable, classify_readable(folder, list(files))):
            rows.append(row)
            if "error" in row:
                errors.print(f"[red]error:[/] {plain(row['error'])}", soft_wrap=True)
            elif not as_json:
                console.print(f"[bold]{plain(row['image'])}[/]")
                for top in row["top"]:
                    console.print(f"  {top['probability']:7.2%}  {plain(top['class'])}")
    except UserError as error:
        raise RecipeError(str(error)) from None
    if as_json:
        print_json(rows)
    if any("error" in row for row in rows):
        raise typer.Exit(1)


def _image_files(path: Path) -> list[Path]:
    """Return the file itself, or the images below a folder, by their extensions. Raises RecipeError."""
    try:
        if stat.S_ISREG(mode := path.stat().st_mode):
            return [path]
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file or folder") from None
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise RecipeError(f"{path}: not a file or folder")
    from ray_jobs.sources.readers.folder import EXTENSIONS

    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in EXTENSIONS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise RecipeError(f"{path}: no images found ({', '.join(EXTENSIONS)})")
    return files
