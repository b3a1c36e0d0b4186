"""The commands verify-protocol and explain: does a published number repeat, and why do two results differ?"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext, redirect_stdout
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from pipelines.commands.common import (
    DEFAULT_STORE,
    AddressOption,
    Commands,
    JsonOption,
    SetOption,
    StoreOption,
    TokenOption,
    console,
    open_,
    print_json,
    say,
)
from pipelines.commands.running import Request, carry_out
from pipelines.engine.plan import plan_pipeline
from pipelines.recipe.pipeline import pin
from pipelines.results import explain as explaining
from pipelines.results.accuracies import labels_of, table_with_title
from pipelines.results.explain import Difference, Repetitions, Side
from pipelines.results.published import find_published, repetition, verdict
from pipelines.spec import RecipeError, quantity
from pipelines.store import Store

app = Commands()


@app.command("verify-protocol")
def verify_protocol(
    name: Annotated[str, typer.Argument(help="a row of pipelines/spec/published.yaml, such as augreg_b32_pets")],
    archive: Annotated[str, typer.Argument(help="the folder, or s3://bucket/prefix, of the authors' archives")],
    weights: Annotated[str, typer.Argument(help="the published weights: a file, or hf:ORG/NAME")],
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
    changes: SetOption = None,
    accuracy: Annotated[
        float | None,
        typer.Option(
            "--published", min=0, max=100, help="compare with this accuracy in percent instead of the table's"
        ),
    ] = None,
) -> None:
    """Fine-tune published weights as published, and compare the mean of three seeds with the published accuracy.

    Exit code 1 if they differ by more than 0.3 percentage points.
    """
    row = find_published(name)
    pipeline = pin(repetition(row, archive, weights, tuple(changes or ())), (row.stage, "backbone"))
    planned = carry_out(Request(pipeline, (row.stage,)), store, address, token_file)
    (manifest,) = (stage.manifest for stage in planned if stage.name == row.stage and stage.manifest)
    result = verdict(row, manifest, accuracy)
    say(f"{row.name}: {row.weights}; {row.source}")
    if changes:
        say(f"changed: {', '.join(changes)}; this is not the published protocol")
    say(str(result))
    if not result.passes:
        raise typer.Exit(1)


@app.command("explain")
def explain(
    a: Annotated[
        str,
        typer.Argument(help="an evaluation, a fine-tuned model or a detector: a key prefix, RUN/STAGE or @ALIAS"),
    ],
    b: Annotated[str, typer.Argument(help="the other one, of the same task")],
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0,
            help="repeat A only as often as fits into this time, if each takes as long as A or B; default: evaluations"
            " without a limit, fine-tunings not at all",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fields of the protocol that make two results differ.

    Repeats A with one field of B at a time: a field of the stage, the data set or an imported model. Shows each field's
    contribution to the difference, and its known effects in published results.
    """
    opened = open_(store, create=False)
    sides = explaining.find_side(opened, a), explaining.find_side(opened, b)
    keys = {name: side.manifest.key for name, side in zip((a, b), sides, strict=True)}
    if not any(explaining.measured(opened, keys).values()):
        raise RecipeError(f"neither {a} nor {b} has an accuracy, mAP, AP or mIoU; `report list` shows other metrics")
    try:
        fields = explaining.differences(opened, *sides)
        plan = explaining.repetitions(*sides, fields)
        _check_cached(opened, plan, sides)
    except RecipeError:
        _show(opened, sides, explaining.no_repetitions(*sides), [], {}, as_json)
        raise
    wanted = _affordable(plan, sides, minutes)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        planned = carry_out(Request(plan.pipeline, wanted), store, address, token_file) if len(wanted) > 2 else []
    repeated = {stage.name: stage.manifest.key for stage in planned if stage.manifest and stage.name in wanted}
    is_shared = _show(opened, sides, plan, fields, repeated, as_json)
    if as_json:
        return
    if not fields:
        say("the protocols, data and models of A and B are the same")
    if is_shared and (missing := len(plan.stages) - len(wanted)):
        each = _seconds(sides) / 60
        say(
            f"not run: {quantity(missing, 'repetition')} of A (one per field"
            f"{', and one with all fields' if plan.together else ''}), each of about {each:.1f} minutes;"
            f" `--minutes {math.ceil((len(plan.stages) - 2) * each)}` runs all"
        )


def _show(
    store: Store,
    sides: tuple[Side, Side],
    plan: Repetitions,
    fields: list[Difference],
    repeated: dict[str, str],
    as_json: bool,
) -> bool:
    """Print both results and each difference's contribution, if A was `repeated` (stage -> key) with it.

    Returns:
        Whether the results have a setting in common.
    """
    keys = {name: side.manifest.key for name, side in zip((plan.a, plan.b), sides, strict=True)}
    lines = explaining.attributed(plan, fields, explaining.measured(store, repeated | keys))
    known = explaining.literature(fields)
    is_shared = any(line["rest"] is not None for line in lines)
    if as_json:
        print_json({"a": sides[0].manifest.key, "b": sides[1].manifest.key, "settings": lines, "literature": known})
        return is_shared
    console.print(_table(lines, fields))
    if not is_shared:
        say("A and B have no setting in common: no protocol with the same number of labels")
    for text in known:
        say(text)
    return is_shared


def _check_cached(store: Store, plan: Repetitions, sides: tuple[Side, Side]) -> None:
    """Raise RecipeError if the recorded recipes no longer give the two results."""
    names = plan.pipeline.needed_for((plan.a, plan.b))
    keys = {stage.name: stage.manifest and stage.manifest.key for stage in plan_pipeline(store, plan.pipeline, names)}
    for name, side in zip((plan.a, plan.b), sides, strict=True):
        if keys[name] != side.manifest.key:
            raise RecipeError(
                f"{side.manifest.stage} ({side.manifest.key[:12]}) cannot be repeated: its source files or this"
                " version's jobs have changed since. Run its recipe again, and explain the new result"
            )


def _affordable(plan: Repetitions, sides: tuple[Side, Side], minutes: float | None) -> tuple[str, ...]:
    """Return the stages to run: as many repetitions as fit into the time."""
    both, more = (plan.a, plan.b), plan.stages[2:]
    if minutes is None:
        return (*both, *more) if sides[0].manifest.kind == "evaluation" else both
    return (*both, *more[: int(60 * minutes / _seconds(sides))])


def _seconds(sides: tuple[Side, Side]) -> float:
    """Return how long a repetition takes, in seconds: as long as A or B, whichever took longer; at least 1."""
    return max(1.0, *(side.manifest.seconds for side in sides))


def _table(lines: list[dict[str, Any]], fields: list[Difference]) -> Table:
    """Return a table in percentage points: a row per field, a column per setting."""
    table = table_with_title(None)
    metrics = " or ".join(dict.fromkeys(line["metric"] for line in lines))
    table.add_column(f"{metrics} %, and what each field of B changes in A", overflow="fold")
    for line in lines:
        heading = ", ".join(filter(None, (line["protocol"], labels_of(line), line["scored"])))
        heading += f", {line['metric']}" * (" or " in metrics)
        table.add_column(Text(heading), justify="right")
    table.add_row("A", *(_percent(line["a"]) for line in lines))
    effects = [{field["field"]: field for field in line["fields"]} for line in lines]
    largest = sorted(fields, key=lambda field: -max(abs(row[field.name]["effect"] or 0.0) for row in effects))
    for field in largest:
        label = f"{field.name}: {_as_text(field.a)} -> {_as_text(field.b)}"
        note = effects[0][field.name]["note"]
        if note:
            label += f" (not possible alone: {note})"
        absent = "–" if note else "not run"
        table.add_row(Text(label), *(_points(row[field.name]["effect"], absent) for row in effects))
    is_measured = any(field["effect"] is not None for line in lines for field in line["fields"])
    rest = "in combination, or unexplained" if is_measured else "B - A"
    table.add_row(rest, *(_points(line["rest"], "–") for line in lines), style="dim")
    if any(line["together"] is not None for line in lines):
        table.add_row("all fields together", *(_points(line["together"], "not run") for line in lines))
    table.add_row("B", *(_percent(line["b"]) for line in lines))
    return table


def _percent(accuracy: float | None) -> str:
    return "–" if accuracy is None else f"{100 * accuracy:.1f}"


def _points(effect: float | None, absent: str) -> str:
    return absent if effect is None else f"{100 * effect:+.1f}"


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_as_text(item)}" for name, item in value.items() if item is not None)
    return "none" if value is None else str(value)
