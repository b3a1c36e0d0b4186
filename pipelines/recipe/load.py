"""Reading recipes: YAML in, a checked `Pipeline` out, and one clear line for each thing that is wrong."""

from __future__ import annotations

import ast
import inspect
import itertools
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

import vit_model.config
from pipelines.recipe import matrix
from pipelines.recipe.pipeline import Pipeline, base
from pipelines.spec import (
    SOURCE_TYPES,
    STAGE_TYPES,
    Finetune,
    GivenPreprocessing,
    Labels,
    ModelSize,
    Optimizer,
    Pretrain,
    RecipeError,
    ResNetSize,
    nearest,
)
from vit_model.config import family_of
from vit_model.variants import RESNETS, VARIANTS

MAX_RECIPE_BYTES = 1 << 20  # a recipe is read by people; more than this is not one
# what YAML's constructors raise for dates that are none, keys that are lists, ten thousand brackets
_UNREADABLE = (yaml.YAMLError, ValueError, TypeError, RecursionError, OSError)
NESTED = {"optimizer": Optimizer, "labels": Labels, "preprocessing": GivenPreprocessing}
MODELS = {"vit": ModelSize, "resnet": ResNetSize}


class _StrictLoader(yaml.SafeLoader):
    """YAML's plain data, no repeated keys (YAML would keep the last in silence) and no aliases (they can explode)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise RecipeError(f"line {line}: YAML aliases are not supported, write it out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise RecipeError(f"line {key_node.start_mark.line + 1}: the key {key!r} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def recipe_path(pipeline: str) -> Path:
    """The file that PIPELINE means: a path, or the name of a shipped recipe."""
    path = Path(pipeline)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        if not path.is_file():
            raise RecipeError(f"{pipeline}: no such file")
        return path
    shipped = Path(__file__).parents[1] / "recipes"
    names = sorted(file.stem for file in shipped.glob("*.yaml"))
    if pipeline not in names:
        raise RecipeError(f"no file and no shipped recipe is called {pipeline!r}{nearest(pipeline, names)}")
    return shipped / f"{pipeline}.yaml"


def load_pipeline(pipeline: str, overrides: tuple[str, ...] = ()) -> Pipeline:
    """Read a recipe file (or a shipped recipe's name), with `stage.field=value` overrides put in before it is checked.

    Raises:
        RecipeError: with one line for each thing that is wrong.
    """
    path = recipe_path(pipeline)
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise RecipeError(
            f"{path}: a recipe is a mapping with name and stages, this is a {type(raw).__name__}"
        )
    for override in overrides:
        _apply_override(raw, override)
    try:
        expanded = matrix.expand(raw)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    return parse_pipeline(expanded, str(path), overrides)


def parse_pipeline(raw: dict[str, Any], where: str, overrides: tuple[str, ...] = ()) -> Pipeline:
    """Check a pipeline whose stages are expanded; `where` begins the message of a `RecipeError`.

    If one of the `overrides` gave a wrong field, the message names that option.
    """
    try:
        return Pipeline.model_validate(raw)
    except ValidationError as error:
        found: dict[str, list[str]] = {}  # what is wrong -> the stages, of which a matrix makes many
        for problem in error.errors():
            stage = str(problem["loc"][1]) if len(problem["loc"]) > 1 else ""
            line = _explain(raw, dict(problem), overrides)
            found.setdefault(line.replace(f"stages.{stage}", f"stages.{base(stage)}", 1), []).append(stage)
        lines = [
            line if not {*map(base, stages)} - {*stages} else f"{line} (in {_several(stages)})"
            for line, stages in found.items()
        ]
        if all(line.startswith("--set ") for line in lines):
            raise RecipeError("\n  ".join(lines)) from None
        raise RecipeError("\n  ".join([f"{where}:", *lines])) from None


def _several(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def schema() -> dict[str, Any]:
    """The JSON Schema of a recipe: a pipeline's, with the `matrix` of a stage and the names that stand for models."""
    found = Pipeline.model_json_schema()
    for stage in STAGE_TYPES.values():
        found["$defs"][stage.__name__]["properties"]["matrix"] = {
            "title": "Matrix",
            "description": "dotted field -> values: one stage for each combination, called stage@field=value,...",
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {"type": "array", "minItems": 1, "uniqueItems": True},
        }
    for name, said in _said_of_models().items():
        for model in (ModelSize, ResNetSize):
            if name in model.model_fields:
                found["$defs"][model.__name__]["properties"][name].setdefault("description", said)
    for stage in (Pretrain, Finetune):
        properties = found["$defs"][stage.__name__]["properties"]
        properties["model"] = {"anyOf": [{"enum": [*VARIANTS, *RESNETS]}, properties["model"]]}
    return found


def _said_of_models() -> dict[str, str]:
    """Option of a model -> the docstring below it, which pydantic would look up at every start of the program."""
    found = {}
    for node in ast.parse(Path(vit_model.config.__file__).read_text("utf-8")).body:
        body = node.body if isinstance(node, ast.ClassDef) and node.name.endswith("Options") else []
        for field, said in itertools.pairwise(body):
            match field, said:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


def read_yaml(path: Path) -> Any:
    """What stands in a file that a person wrote. Raises RecipeError, naming it, where it is not plain YAML."""
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise RecipeError(f"larger than {MAX_RECIPE_BYTES} bytes, that is no recipe")
        return yaml.load(path.read_text("utf-8"), Loader=_StrictLoader)
    except _UNREADABLE as error:
        raise RecipeError(f"{path}: {error}") from None


def _apply_override(raw: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    stage, _, field = path.partition(".")
    if not equals or not field:
        raise RecipeError(f"--set {override}: write STAGE.FIELD=VALUE, as in pretrain.steps=500")
    stages = raw.get("stages")
    if not isinstance(stages, dict) or stage not in stages:
        raise RecipeError(f"--set {override}: no stage is called {stage!r}{nearest(stage, stages or {})}")
    at = stages[stage]
    if not isinstance(at, dict):
        raise RecipeError(f"--set {override}: stage {stage} has no fields")
    for axis in matrix.axes(at):
        if matrix.inside(field, str(axis)):
            raise RecipeError(
                f"--set {override}: {axis} is an axis of the matrix of {stage}, whose values are "
                f"{matrix.axes(at)[axis]}; change them with --set {stage}.matrix.{axis}=[...]"
            )
    try:
        new = yaml.load(value, Loader=_StrictLoader)
        if field.startswith("matrix."):
            at.setdefault("matrix", {})[field.removeprefix("matrix.")] = new
        else:
            matrix.set_field(at, field, new)
    except _UNREADABLE as error:
        raise RecipeError(f"--set {override}: {error}") from None


def _given_by(field: str, overrides: tuple[str, ...]) -> str | None:
    """The last override that gave the value of a field, or of one that it is in."""
    found = [given for given in overrides if f"{field}.".startswith(f"{given.partition('=')[0]}.")]
    return found[-1] if found else None


def _explain(raw: dict[str, Any], problem: dict[str, Any], overrides: tuple[str, ...]) -> str:
    """One line: where, what was given, what would be right."""
    # pydantic puts a union's tag (the job's, the source's or the model's kind) into the path: it is not in the YAML
    location = [str(part) for part in problem["loc"]]
    path: list[str] = []
    at: Any = raw
    for before, part in zip(["", *location], location, strict=False):
        if isinstance(at, dict) and part not in at and part in {at.get("job"), at.get("kind")}:
            continue
        if before == "model" and part in MODELS:
            continue
        path.append(part)
        at = at.get(part) if isinstance(at, dict) else at
    where = ".".join(path)
    message = problem["msg"].removeprefix("Value error, ")
    field = ".".join([*map(base, path[1:2]), *path[2:]])  # as --set names it
    owner = ""
    if (override := _given_by(field, overrides)) is not None:
        where = f"--set {override}" if override.startswith(f"{field}=") else f"--set {override}: {field}"
        owner = f"{field.rpartition('.')[0]}."
    if problem["type"] == "extra_forbidden":
        said = nearest(path[-1], _siblings(raw, path)).replace("mean '", f"mean '{owner}")
        return f"{where}: there is no such field{said}"
    if problem["type"] == "missing":
        given = f"; write it there, or --set {field}=..." if path[0] == "stages" else ""
        return f"{where}: is missing{given}"
    if problem["type"].startswith("value_error"):
        return f"{where}: {message}" if where else message
    return f"{where}: {message}, not {problem['input']!r}"


def _siblings(raw: dict[str, Any], path: list[str]) -> list[str]:
    """The fields that may stand where `path` ends."""
    if len(path) == 1:
        return list(Pipeline.model_fields)
    stage = raw["stages"].get(path[1], {}) if path[0] == "stages" else {}
    model: Any = STAGE_TYPES.get(stage.get("job", ""))
    for part in path[2:-1]:
        if part == "source":
            model = SOURCE_TYPES.get(stage["source"]["kind"])
        elif part == "model":
            model = MODELS[family_of(stage["model"])]
        else:
            model = NESTED.get(part)
    return [*(model.model_fields if model else ()), *(["matrix"] if len(path) == 3 else ())]
