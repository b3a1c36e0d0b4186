"""The commands alias list, set, history and rollback: names such as @production for models, and who moved them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pipelines.commands.common import (
    DEFAULT_STORE,
    Commands,
    JsonOption,
    StoreOption,
    named_weights,
    open_,
    print_rows,
    say,
)
from pipelines.results.lookup import alias_record, recipe_and_stage
from pipelines.spec import RecipeError
from pipelines.store import (
    Alias,
    InputRef,
    Store,
    alias_history,
    alias_names,
    check_alias,
    input_ref,
    move_alias,
    not_undone,
    read_alias,
    read_manifest,
    read_or_warn,
)

app = Commands(name="alias", help="Name models: wherever a command or a recipe takes a model, it takes @NAME.")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="the name of an alias, such as production")]


@app.command("list")
def alias_list(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """List the aliases, the model that each names, and who moved it there."""
    opened = open_(store, create=False)
    records = {name: read_alias(opened, name) for name in alias_names(opened)}
    rows = [_row(opened, name, record) for name, record in records.items() if record is not None]
    print_rows(rows, ("alias", "recipe/stage", "key", "moved", "why", "who"), as_json)


@app.command("set")
def alias_set(
    name: NameArgument,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a key or unique key prefix, RECIPE/STAGE, RUN or another @NAME")
    ],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Let an alias name a model."""
    opened, name = open_(store, create=False), check_alias(name.removeprefix("@"))
    _move(opened, name, input_ref(opened, named_weights(opened, model)), read_alias(opened, name), "person")


@app.command("history")
def alias_history_(name: NameArgument, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """List every move of an alias, oldest first."""
    opened, name = open_(store, create=False), name.removeprefix("@")
    alias_record(opened, name)
    rows = [_row(opened, name, record) for record in alias_history(opened, name)]
    print_rows(rows, ("number", "recipe/stage", "key", "moved", "why", "who", "run"), as_json)


@app.command("rollback")
def alias_rollback(
    name: NameArgument,
    to: Annotated[
        int | None,
        typer.Option("--to", min=1, help="the number of a move; default: the last before the current model's"),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Let an alias name an earlier model again. The history keeps every move."""
    opened, name = open_(store, create=False), name.removeprefix("@")
    current = alias_record(opened, name)
    history = alias_history(opened, name)
    if to is None:
        others = [record for record in not_undone(history) if record.target not in (None, current.target)]
    else:
        others = [record for record in history if record.number == to]
    if not others or others[-1].target is None:
        wanted = f"move {to}" if to else "earlier move to another model"
        raise RecipeError(f"@{name} has no {wanted} to go back to; `vitflow alias history {name}` lists its moves")
    target = others[-1].target
    if read_manifest(opened, target.job, target.key) is None:
        raise RecipeError(f"@{name}: model {target.key[:12]} of move {others[-1].number} was removed from the store")
    _move(opened, name, target, current, "rollback")


def _move(store: Store, name: str, target: InputRef, current: Alias | None, why: Any) -> None:
    if current is not None and current.target == target:
        say(f"@{name} already names {_described(store, target)}")
        return
    record = move_alias(store, name, target, current.number if current else 0, why)
    before = f"; before: {_described(store, current.target)}" if current and current.target else ""
    say(f"@{name} names {_described(store, target)} (move {record.number}){before}")


def _row(store: Store, name: str, record: Alias) -> dict[str, Any]:
    target = record.target
    return {
        "alias": name,
        "number": record.number,
        "recipe/stage": target and _recipe_and_stage(store, target),
        "job": target and target.job,
        "key": target and target.key,
        "moved": record.time[:19],
        "why": record.why,
        "who": record.who,
        "report": record.report,
        "run": record.run,
    }


def _described(store: Store, target: InputRef) -> str:
    return f"{_recipe_and_stage(store, target) or target.job} {target.key[:12]}"


def _recipe_and_stage(store: Store, target: InputRef) -> str | None:
    """Return RECIPE/STAGE of a model; None if it was removed."""
    found = read_or_warn(store, target.job, target.key)
    return found and recipe_and_stage(found[0])
