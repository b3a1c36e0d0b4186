"""The commands init and predict, for your own images."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
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
    named_weights,
    new_folder,
    open_,
    plain,
    print_csv,
    print_json,
)
from pipelines.spec import LAST, RecipeError
from pipelines.store import model_folder
from vit_model.contract import is_segmenter
from vit_model.detection.contract import SHOWN, is_detector

if TYPE_CHECKING:
    from ray_jobs.data.shards import Split

app = Commands()


@app.command("init")
def init(
    file: Annotated[Path, typer.Argument(help="the recipe to write")],
    images: Annotated[
        Path,
        typer.Option(
            help="class folders, train/val/test folders, a folder with a metadata.csv, .jsonl or .parquet, boxes or"
            " masks, or images alone; or a zip or tar of these"
        ),
    ],
    source: Annotated[
        str,
        typer.Option(
            help="the kind of source with --images as its root, or its fields: '{kind: cifar, classes: 100}' or"
            " '{label_column: labels}'"
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
    _check_new(file)  # before the slow part
    from pipelines.machine.init import write_recipe  # with torch, and readers of images

    write_recipe(file, images, source, [*(weights or ()), *(others or ())], store, console)


def _check_new(file: Path) -> None:
    """Check that a recipe can be written. Raises RecipeError."""
    if file.exists():
        raise RecipeError(f"{file} exists; use another name, or remove it")
    if not file.parent.is_dir():
        raise RecipeError(f"{file.parent} is not a folder; create it, or write the recipe elsewhere")
    if file.suffix not in {".yaml", ".yml"}:
        raise RecipeError(f"{file}: expected a name that ends in .yaml")
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise RecipeError(f"{file}: cannot write to {file.parent.resolve()}: {error.strerror}") from None


@app.command("predict")
def predict(
    model: Annotated[
        str,
        typer.Argument(
            help="a model: its key, a unique key prefix, RUN/STAGE or @ALIAS; or exported or published weights:"
            " a file or folder"
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
            "--csv",
            help="a line per image: image, prediction, probability; with --split, also label. If an image can"
            " have several classes, prediction has all of them, and there is no probability",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="the folder to create; of a detector, with detections.json, in COCO's format, and a picture of each"
            " image with its objects; of a model of pixels, with each image's mask"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Classify images; print the five likeliest classes of each, or more if more reach their thresholds.

    With a detector, find objects: prints those with a score of 0.5 or more; --json and --csv have all of them, with
    boxes as COCO has them (x, y, width, height in pixels). With a model of pixels, print each class's share of them.

    Files and folders that cannot be read are named on stderr. The others are still classified, and the exit code is 1.
    """
    if as_csv and as_json:
        raise RecipeError("--csv and --json cannot be combined; use one of them")
    with nullcontext() if output is None else new_folder(output) as folder:
        predicted = _predicted(model, images or [], split, checkpoint, store, folder)
        rows = list(_printed(predicted, as_text=not (as_csv or as_json)))
    if as_json:
        print_json(rows)
    if as_csv:
        _print_table(rows, split is not None)
    if any("error" in row for row in rows):
        raise typer.Exit(1)


def _print_table(rows: list[dict[str, Any]], has_labels: bool) -> None:
    """Print a line per image, per object, or per class of pixels."""
    if any("pixels" in row for row in rows):
        shares = [(row["image"], *each.values()) for row in rows for each in row.get("pixels", ())]
        print_csv(["image", "class", "share"], shares)
        return
    if any("objects" in row for row in rows):
        objects = [(row["image"], each) for row in rows for each in row.get("objects", ())]
        header = ["image", "class", "score", "x", "y", "width", "height"]
        print_csv(header, ([image, each["class"], each["score"], *each["bbox"]] for image, each in objects))
        return
    answers = [row | _answer(row) for row in rows if "top" in row]
    has_probability = any("probability" in row for row in answers)
    names = ["image", "prediction", *["probability"] * has_probability, *["label"] * has_labels]
    print_csv(names, ([row[name] for name in names] for row in answers))


def _predicted(
    model: str, images: list[Path], split: Split | None, checkpoint: str, store: str, output: Path | None
) -> Iterator[dict[str, Any]]:
    """Return the rows of `pipelines.results.predictions`, which also writes them to the folder `output`."""
    if not (images or split):
        raise RecipeError(f"what to classify is missing; give IMAGES, or --split test for the test images of {model}")
    if split and (images or output):
        option = "IMAGES" if images else "--output, which takes IMAGES"
        raise RecipeError(f"--split {split} cannot be combined with {option}; use one of them")
    if split is None:
        weights = _weights(model, checkpoint, store)
        if output is not None and not (is_detector(weights) or is_segmenter(weights)):
            raise RecipeError(f"--output takes a detector or a model of pixels, and {model} is neither")
    else:
        opened = open_(store, create=False)
        manifest = named_weights(opened, model)
        if manifest.kind == "detector":
            raise RecipeError(f"--split {split}: {model} is a detector, which takes IMAGES")
    from pipelines.results import predictions  # with torch

    if split is not None:
        return predictions.of_split(opened, manifest, checkpoint, split)
    return predictions.of_files(weights, images, output)


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    """Return the likeliest class and its probability, or the names of all classes that the model predicts."""
    if "classes" in row:
        return {"prediction": "; ".join(row["classes"])}
    top = row["top"][0]
    return {"prediction": top["class"], "probability": top["probability"]}


def _printed(rows: Iterable[dict[str, Any]], as_text: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows; print each error on stderr, and each image's classes if `as_text`."""
    for row in rows:
        if "error" in row:
            errors.print(f"[red]error:[/] {plain(row['error'])}", soft_wrap=True)
        elif as_text:
            label = f"  (label: {plain(row['label'])})" if "label" in row else ""
            console.print(f"[bold]{plain(row['image'])}[/]{label}")
            for found in row.get("objects", ()):
                if found["score"] >= SHOWN:
                    box = ", ".join(f"{side:.0f}" for side in found["bbox"])
                    console.print(f"  {found['score']:7.2f}  {plain(found['class'])} \\[{box}]")
            for found in row.get("pixels", ()):
                console.print(f"  {found['share']:7.2%}  {plain(found['class'])}")
            for top in row.get("top", ()):
                is_chosen = "  predicted" if top["class"] in row.get("classes", ()) else ""
                threshold = f"  (threshold {top['threshold']:.2%})" if "threshold" in top else ""
                console.print(f"  {top['probability']:7.2%}  {plain(top['class'])}{is_chosen}{threshold}")
        yield row


def _weights(model: str, checkpoint: str, store: str) -> Path:
    """Return the path of weights outside the store if `model` is one, else the folder of the stored model."""
    path = Path(model)
    if path.is_file() or (path / "config.json").is_file():
        if checkpoint != LAST:
            raise RecipeError(f"--checkpoint {checkpoint}: {model} is outside the store; only its models have several")
        return path
    opened = open_(store, create=False)
    try:
        return model_folder(opened, named_weights(opened, model), checkpoint)
    except RecipeError:
        if path.exists():
            raise RecipeError(
                f"{model}: no weights that `predict` reads; expected a folder with config.json, or a file of weights"
                " (onnxruntime runs ONNX)"
            ) from None
        raise
