"""The commands init and predict, for your own images."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    print_csv,
    print_json,
)
from pipelines.results.lookup import find_artifact
from pipelines.spec import LAST, Import, RecipeError
from pipelines.store import model_folder, read_manifest
from vit_model.errors import UserError

if TYPE_CHECKING:
    from ray_jobs.data.shards import Split
    from vit_model.build import Network
    from vit_model.contract import ModelContract

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
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WEIGHTS...",
            help="pretrained weights to compare on the images, two or more; each as `vitflow import` takes it",
        ),
    ] = None,
    others: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="weights")] = None,
) -> None:
    """Write a recipe for your images, with a model that fits them and this machine.

    With --compare A.npz B_folder hf:ORG/NAME, the recipe compares these weights instead.
    """
    if compare:
        from pipelines.machine.compare import write_comparison  # with torch

        write_comparison(file, images, source, [*compare, *(others or ())], console)
    elif others:
        raise RecipeError(f"unexpected argument {others[0]!r}; weights follow --compare")
    else:
        from pipelines.machine.init import write_recipe  # with readers of images

        write_recipe(file, images, source, console)


@app.command("predict")
def predict(
    model: Annotated[
        str,
        typer.Argument(
            help="a model: its key, a unique key prefix, or RUN/STAGE; or exported or published weights, as"
            " `vitflow import` takes them"
        ),
    ],
    images: Annotated[
        list[Path] | None, typer.Argument(help="image files, or folders with images at any depth")
    ] = None,
    split: Annotated[
        Literal["train", "dev", "test"] | None,
        typer.Option(help="instead of IMAGES: this split of the data set that the model was trained on"),
    ] = None,
    checkpoint: CheckpointOption = LAST,
    store: StoreOption = DEFAULT_STORE,
    as_csv: Annotated[
        bool,
        typer.Option(
            "--csv", help="a line per image: file, prediction, probability; with --split, also label"
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Classify images; print the five likeliest classes of each.

    Files and folders that cannot be read are named on stderr. The others are still classified, and the exit code is 1.
    """
    if bool(images) == bool(split) or (as_csv and as_json):
        raise RecipeError("give either IMAGES or --split, and at most one of --csv and --json")
    try:
        if split:
            rows: Iterable[dict[str, Any]] = _of_split(model, split, checkpoint, store)
        else:
            rows = _of_files(model, images or [], checkpoint, store)
        rows = list(_printed(rows, as_text=not (as_csv or as_json)))
    except UserError as error:
        raise RecipeError(str(error)) from None
    if as_json:
        print_json(rows)
    if as_csv:
        names = ["image", "prediction", "probability", *(["label"] if split else [])]
        likeliest = [
            row | row["top"][0] | {"prediction": row["top"][0]["class"]} for row in rows if "top" in row
        ]
        print_csv(names, ([row[name] for name in names] for row in likeliest))
    if any("error" in row for row in rows):
        raise typer.Exit(1)


def _printed(rows: Iterable[dict[str, Any]], as_text: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows; print each error on stderr, and each image's classes if `as_text`."""
    for row in rows:
        if "error" in row:
            errors.print(f"[red]error:[/] {plain(row['error'])}", soft_wrap=True)
        elif as_text:
            label = f"  (label: {plain(row['label'])})" if "label" in row else ""
            console.print(f"[bold]{plain(row['image'])}[/]{label}")
            for top in row["top"]:
                console.print(f"  {top['probability']:7.2%}  {plain(top['class'])}")
        yield row


def _of_files(model: str, images: Sequence[Path], checkpoint: str, store: str) -> Iterator[dict[str, Any]]:
    """Classify files, and those in folders. Raises RecipeError if there are none."""
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

    return chain(unreadable, classify_readable(*_load(model, checkpoint, store), list(files)))


def _load(model: str, checkpoint: str, store: str) -> tuple[Network, ModelContract]:
    """Load a model of the store; or weights outside it, if `model` is the path of a file or of a folder with them."""
    path = Path(model)
    if not (path.is_file() or (path / "config.json").is_file()):
        opened = open_(store, create=False)
        path = model_folder(opened, find_artifact(opened, model, "model"), checkpoint)
    from ray_jobs.import_model import model_of
    from vit_model import formats

    return model_of(formats.read(path), Import(job="import", path=str(path)))


def _of_split(model: str, split: Split, checkpoint: str, store: str) -> Iterator[dict[str, Any]]:
    """Classify a split of the data set that a model was trained on; the rows also have the label."""
    opened = open_(store, create=False)
    manifest = find_artifact(opened, model, "model")
    if not (inputs := manifest.inputs.get("data")):
        raise RecipeError(
            f"--split {split}: vitflow did not train {model}, so it knows no data set; give IMAGES"
        )
    data = read_manifest(opened, inputs[0].job, inputs[0].key)
    if data is None:
        raise RecipeError(f"--split {split}: the data set of {model} is not in {store}; give IMAGES")
    from ray_jobs.data.shards import open_artifact
    from vit_model.predict import BATCH, likeliest
    from vit_model.weights import load_model

    network, contract = load_model(model_folder(opened, manifest, checkpoint))
    dataset = open_artifact(opened, data)
    dataset.require(split)
    index = dataset.index(split)
    for start in range(0, len(index), BATCH):
        part = index.slice(start, BATCH)
        tops = likeliest(network, contract, dataset.load(part, contract.preprocessing))
        for key, label, top in zip(part["key"].to_pylist(), part["label"].to_pylist(), tops, strict=True):
            yield {"image": key, "label": dataset.info.class_names[label], "top": top}


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
