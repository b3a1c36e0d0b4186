"""init, predict: your own images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.common import (
    DEFAULT_STORE,
    JsonOption,
    StoreOption,
    console,
    open_,
    plain,
    print_json,
)
from pipelines.spec import RecipeError
from pipelines.store import local_files

if TYPE_CHECKING:
    pass


def init(
    file: Annotated[Path, typer.Argument(help="the recipe to write")],
    images: Annotated[
        Path,
        typer.Option(help="class folders, train/val/test folders, or a folder with metadata.csv or .jsonl"),
    ],
) -> None:
    """Look at a folder of images and write a recipe that trains on them."""
    from pipelines.init import write_recipe

    write_recipe(file, images, console)


def predict(
    model: Annotated[str, typer.Argument(help="a model's key or its beginning, or RUN/STAGE")],
    images: Annotated[list[Path], typer.Argument(help="image files")],
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Classify images with a model of the store: the five likeliest classes of each."""
    from pipelines.lookup import find_artifact

    opened = open_(store, create=False)
    manifest = find_artifact(opened, model, "model")
    missing = [str(path) for path in images if not path.is_file()]
    if missing:
        raise RecipeError(f"no such file: {', '.join(missing)}")
    from vit_model.predict import classify

    try:
        rows = classify(local_files(opened, manifest), images)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    if as_json:
        print_json(rows)
        return
    for row in rows:
        console.print(f"[bold]{plain(row['image'])}[/]", highlight=False)
        for top in row["top"]:
            console.print(f"  {top['probability']:7.2%}  {plain(top['class'])}", highlight=False)
