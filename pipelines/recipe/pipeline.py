"""A pipeline: stages by name that name each other as inputs, their order, and what people mean by a stage's name."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from pipelines.spec import RecipeError, Stage, input_fields, nearest
from vit_model.config import Frozen


class Pipeline(Frozen):
    """Stages by name; a stage names earlier ones as its inputs. The order in the file is for its reader.

    A stage that a recipe writes with a `matrix` stands here as its members: pretrain@width=32,seed=0
    (`pipelines.recipe.matrix` expands it).
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,40}$")
    description: str = ""
    stages: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,40}(@[A-Za-z0-9_.,=+-]+)?$")], Stage] = (
        Field(min_length=1)
    )

    @model_validator(mode="after")
    def _inputs_exist_and_fit(self) -> Self:
        for name, stage in self.stages.items():
            kinds = input_fields(type(stage))
            for field, inputs in stage.inputs().items():
                for given in inputs:
                    self._check_input(f"stages.{name}.{field}", given, kinds[field])
        self.order()
        return self

    def _check_input(self, where: str, given: str, kinds: tuple[str, ...]) -> None:
        if given not in self.stages:
            raise ValueError(f"{where}: {unknown_stage(given, self.stages)}")
        kind = self.stages[given].KIND
        if kind not in kinds:
            fitting = dict.fromkeys(base(name) for name, stage in self.stages.items() if stage.KIND in kinds)
            raise ValueError(
                f"{where}: {given} is {'an' if kind == 'evaluation' else 'a'} {kind}, "
                f"but this takes a {' or '.join(kinds)} ({', '.join(fitting) or 'there is none'})"
            )

    def order(self) -> tuple[str, ...]:
        """Stage names, every one after its inputs; ties in the order of the file."""
        return running_order(self.graph())

    def graph(self) -> dict[str, list[str]]:
        """Stage -> the stages that it takes."""
        return {
            name: [given for inputs in stage.inputs().values() for given in inputs]
            for name, stage in self.stages.items()
        }

    def longest_paths(self) -> dict[str, int]:
        """Stage -> the number of stages on the longest path that begins with it."""
        lengths = dict.fromkeys(self.stages, 1)
        graph = self.graph()
        for name in reversed(self.order()):
            for given in graph[name]:
                lengths[given] = max(lengths[given], lengths[name] + 1)
        return lengths

    def needed_for(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        """The targets (of a matrix all members, or a part, see `members`) and everything they need, in running order.

        Raises:
            RecipeError: a target is not a stage of this pipeline.
        """
        graph = self.graph()
        needed: set[str] = set()
        pending = [name for target in targets for name in members(target, self.stages)]
        while pending:
            name = pending.pop()
            if name not in needed:
                needed.add(name)
                pending += graph[name]
        return tuple(name for name in running_order(graph) if name in needed)


def running_order(graph: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Names, every one after those that `graph` gives for it.

    Raises:
        RecipeError: there is a cycle.
    """
    try:
        return tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise RecipeError(f"stages: a cycle, {' -> '.join(reversed(error.args[1]))}") from None


def base(name: str) -> str:
    """The name that a recipe gave to a stage: pretrain of pretrain@width=32."""
    return name.partition("@")[0]


def members(given: str, names: Iterable[str]) -> tuple[str, ...]:
    """The stages that a person means: one by its name, or of a matrix all (pretrain) or a part (pretrain@seed=1).

    Raises:
        RecipeError: there is none.
    """
    known = list(names)
    if given in known:
        return (given,)
    wanted = set(filter(None, given.partition("@")[2].split(",")))
    found = tuple(
        name
        for name in known
        if "@" in name and base(name) == base(given) and wanted <= set(name.partition("@")[2].split(","))
    )
    if not found:
        raise RecipeError(unknown_stage(given, known))
    return found


def unknown_stage(given: str, names: Iterable[str]) -> str:
    """That no stage is called so, and what is."""
    known = list(names)
    parts = {
        part
        for name in known
        if base(name) == base(given) and "@" in name
        for part in name.partition("@")[2].split(",")
    }
    if parts:
        wanted = given.partition("@")[2]
        return f"{base(given)} has no member {wanted!r}{nearest(wanted, sorted(parts))}"
    return f"no stage is called {given!r}{nearest(given, dict.fromkeys(map(base, known)))}"
