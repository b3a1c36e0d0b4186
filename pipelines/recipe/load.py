"""Reading recipes: YAML in, a validated `Pipeline` out, and one line per error."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

import vit_model.config
from pipelines.recipe import matrix
from pipelines.recipe.pipeline import Pipeline, base, unknown_stage
from pipelines.spec import STAGE_TYPES, Detect, Finetune, ModelSize, Pretrain, RecipeError, ResNetSize, nearest
from vit_model.errors import reason
from vit_model.variants import RESNETS, VARIANTS

MAX_RECIPE_BYTES = 1 << 20  # a larger file is not a recipe
# YAML's constructors raise these for invalid dates, keys that are lists, ten thousand brackets
_UNREADABLE = (yaml.YAMLError, ValueError, TypeError, RecursionError, OSError)
# Other programs' name of a field -> its possible names here, below the stage; the first that the stage has is meant.
_MEANT = {
    "lr": ("learning_rate", "learning_rates"),
    "learning_rate": ("learning_rate", "learning_rates"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epochs", "iterations"), ("steps",)),
    **dict.fromkeys(("bs", "batch", "train_batch_size"), ("batch_size",)),
    **dict.fromkeys(("grad_accum_steps", "accumulation"), ("gradient_accumulation_steps",)),
    **dict.fromkeys(("train", "dataset"), ("data",)),
    **dict.fromkeys(("image_size", "img_size", "input_size"), ("resolution",)),
    **dict.fromkeys(("pretrained", "checkpoint", "weights"), ("backbone", "init_from")),
    **dict.fromkeys(("wd", "weight_decay"), ("optimizer.weight_decay",)),
    **dict.fromkeys(("warmup", "warmup_ratio"), ("optimizer.warmup_fraction",)),
    **dict.fromkeys(("opt", "optim"), ("optimizer.name",)),
    **dict.fromkeys(("sched", "scheduler", "lr_scheduler_type"), ("optimizer.schedule",)),
    **dict.fromkeys(("clip_grad", "max_grad_norm"), ("optimizer.clip_norm",)),
    "smoothing": ("label_smoothing",),
    "drop_path": ("stochastic_depth", "model.stochastic_depth"),
    **dict.fromkeys(("precision", "amp"), ("dtype",)),
    "gpus": ("workers",),
    "path": ("source.root",),
}
_REMARKS = {
    "steps": " (epochs x training images / batch_size)",
    "learning_rates": " (a list, such as [0.001])",
}

# YAML 1.2's numbers; and what YAML 1.1 reads as another number (010 is 8, 1:30 is 90) or what looks like one (08, 0b1).
_NUMBERS = {
    "int": r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|(0|[1-9][0-9]*)(?=[eE]))([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "doubtful": r"[-+]?(0[0-9_]+|0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
    r"|[0-9][0-9_]*\.?[0-9_]*([eE][-+]?[0-9_]+)?)",
}
_TAG = "tag:yaml.org,2002:"
_RESOLVERS = {  # first character -> (tag, pattern); PyYAML's are for YAML 1.1
    first: [
        *(
            (_TAG + name, re.compile(f"(?:{pattern})$"))
            for name, pattern in _NUMBERS.items()
            if first in "-+.0123456789"
        ),
        *((tag, pattern) for tag, pattern in known if tag not in (f"{_TAG}int", f"{_TAG}float")),
    ]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _StrictLoader(yaml.SafeLoader):
    """A loader of plain data with YAML 1.2's numbers.

    It rejects duplicate keys, of which YAML keeps the last, aliases (YAML bombs), and numbers that YAML's versions read
    differently.
    """

    yaml_implicit_resolvers = _RESOLVERS

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise RecipeError(f"line {line}: YAML aliases are not supported; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise RecipeError(f"line {key_node.start_mark.line + 1}: duplicate key {key!r}")
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        try:
            text.encode()
        except UnicodeEncodeError:  # an escape such as "\udcff", half of a character
            raise RecipeError(f"line {node.start_mark.line + 1}: {text!a} is not UTF-8") from None
        return text

    def construct_int(self, node: Any) -> int:
        return int(node.value, 0)

    def construct_float(self, node: Any) -> float:
        number = float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))
        return number or 0.0  # -0.0 and 0.0 would give different keys

    def construct_doubtful(self, node: Any) -> Any:
        text = node.value
        plain = text.replace("_", "").lstrip("+0")
        number = plain if plain.isdecimal() else "a number as in 10, 0.5 or 1e-3"
        raise RecipeError(
            f"line {node.start_mark.line + 1}: {text} is ambiguous in YAML; write {number}, or '{text}' in quotes if it"
            " is text"
        )


for _name in _NUMBERS:
    _StrictLoader.add_constructor(f"{_TAG}{_name}", getattr(_StrictLoader, f"construct_{_name}"))


class _Dumper(yaml.SafeDumper):
    """A writer of the YAML that `_StrictLoader` reads."""

    yaml_implicit_resolvers = _RESOLVERS


def yaml_text(text: str) -> str:
    """Return the YAML of a text, in one line, quoted if a reader would not read it as this text."""
    written: str = yaml.dump(
        [text],
        Dumper=_Dumper,
        default_flow_style=True,
        default_style=None if text.isprintable() else '"',
        allow_unicode=text.isprintable(),
        width=math.inf,
    )
    return written.removeprefix("[").removesuffix("]\n")


def recipe_path(pipeline: str) -> Path:
    """Return the recipe file of a PIPELINE argument: a path, or the name of a shipped recipe."""
    path = Path(pipeline)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        if not path.is_file():
            recipes = [file.name for file in path.parent.glob("*.y*ml")]
            raise RecipeError(f"{pipeline}: no such file{nearest(path.name, recipes) if recipes else ''}")
        return path
    shipped = Path(__file__).parents[1] / "recipes"
    names = sorted(file.stem for file in shipped.glob("*.yaml"))
    if pipeline not in names:
        is_file = Path(f"{pipeline}.yaml").is_file()
        meant = f"; did you mean '{pipeline}.yaml'?" if is_file else nearest(pipeline, names)
        raise RecipeError(f"{pipeline!r} is not a file or a shipped recipe{meant}")
    return shipped / f"{pipeline}.yaml"


def load_pipeline(pipeline: str, overrides: tuple[str, ...] = ()) -> Pipeline:
    """Read a recipe file or a shipped recipe, apply `stage.field=value` overrides, and validate it.

    Raises:
        RecipeError: the recipe is invalid; the message has one line per error.
    """
    path = recipe_path(pipeline)
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: expected a mapping with name and stages, not a {type(raw).__name__}")
    for override in overrides:
        _apply_override(raw, override)
    try:
        expanded = matrix.expand(raw)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    return parse_pipeline(expanded, str(path), overrides)


def parse_pipeline(raw: dict[str, Any], where: str, overrides: tuple[str, ...] = ()) -> Pipeline:
    """Validate a pipeline with expanded stages; the message of a `RecipeError` begins with `where`.

    If one of the `overrides` set an invalid field, the message names that option.
    """
    try:
        return Pipeline.model_validate(raw)
    except ValidationError as error:
        # error -> the stages, because a matrix may repeat an error many times
        stages_of: dict[str, list[str]] = {}
        for problem in _merged(error.errors()):
            stage = str(problem["loc"][1]) if len(problem["loc"]) > 1 else ""
            line = _explain(raw, problem, overrides)
            stages_of.setdefault(line.replace(f"stages.{stage}", f"stages.{base(stage)}", 1), []).append(stage)
        lines = [
            line if not {*map(base, stages)} - {*stages} else f"{line} (in {_several(stages)})"
            for line, stages in stages_of.items()
        ]
        if all(line.startswith("--set ") for line in lines):
            raise RecipeError("\n  ".join(lines)) from None
        raise RecipeError("\n  ".join([f"{where}:", *lines])) from None


def _merged(problems: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield errors without those that follow from others: of a union that may be a name, one with all of its names."""
    names: dict[tuple[int | str, ...], list[str]] = {}
    for problem in problems:
        if problem["type"] == "literal_error":
            expected = re.split(", | or ", problem["ctx"]["expected"])
            names.setdefault(_union(problem), []).extend(name.strip("'") for name in expected)
    for problem in problems:
        kind, value = problem["type"], problem["input"]
        of_union = next((place for place in names if problem["loc"][: len(place)] == place), None)
        if kind == "default_factory_not_called" or (kind == "too_short" and len(value) >= problem["ctx"]["min_length"]):
            continue
        if of_union is None or (kind != "literal_error" and not isinstance(value, str)):
            yield problem
        elif kind == "literal_error" and (isinstance(value, str) or not _has_other(problems, of_union)):
            if names[of_union]:
                yield {**problem, "ctx": {"names": names[of_union]}}
            names[of_union] = []


def _union(problem: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Return the place of the field with a wrong name; pydantic's also has the member of a union."""
    loc: tuple[int | str, ...] = problem["loc"]
    return loc[:-1] if str(loc[-1]).startswith("literal[") else loc


def _has_other(problems: Sequence[Mapping[str, Any]], place: tuple[int | str, ...]) -> bool:
    """Return whether a union at a place also takes values that are not names."""
    return any(problem["type"] != "literal_error" and problem["loc"][: len(place)] == place for problem in problems)


def _several(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe: a pipeline's schema with the `matrix` of a stage and the names of models."""
    schema = Pipeline.model_json_schema()
    for stage in STAGE_TYPES.values():
        schema["$defs"][stage.__name__]["properties"]["matrix"] = {
            "title": "Matrix",
            "description": "dotted field -> values: one stage per combination, named stage@field=value,...",
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {"type": "array", "minItems": 1, "uniqueItems": True},
        }
    for name, description in _model_descriptions().items():
        for model in (ModelSize, ResNetSize):
            if name in model.model_fields:
                schema["$defs"][model.__name__]["properties"][name].setdefault("description", description)
    for stage in (Pretrain, Finetune, Detect):
        properties = schema["$defs"][stage.__name__]["properties"]
        properties["model"] = {"anyOf": [{"enum": [*VARIANTS, *RESNETS]}, properties["model"]]}
    return schema


def _model_descriptions() -> dict[str, str]:
    """Return {option of a model: the docstring below it}. pydantic could do it, but at every start of the program."""
    descriptions = {}
    for node in ast.parse(Path(vit_model.config.__file__).read_text("utf-8")).body:
        body = node.body if isinstance(node, ast.ClassDef) and node.name.endswith("Options") else []
        for field, docstring in itertools.pairwise(body):
            match field, docstring:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    descriptions[name] = inspect.cleandoc(text)
    return descriptions


def read_yaml(path: Path) -> Any:
    """Read a user's YAML file. Raises RecipeError, with the file's name, if it is not plain YAML."""
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise RecipeError(f"larger than {MAX_RECIPE_BYTES:,} bytes, so it is not a recipe")
        with path.open(encoding="utf-8") as file:
            return yaml.load(file, Loader=_StrictLoader)
    except _UNREADABLE as error:
        raise RecipeError(f"{path}: {error}") from None


def _apply_override(raw: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    stage, _, field = path.partition(".")
    if not equals or not field:
        raise RecipeError(f"--set {override}: expected STAGE.FIELD=VALUE, such as pretrain.steps=500")
    stages = raw.get("stages")
    if not isinstance(stages, dict) or stage not in stages:
        raise RecipeError(f"--set {override}: {unknown_stage(stage, _jobs(stages))}")
    fields = stages[stage]
    if not isinstance(fields, dict):
        raise RecipeError(f"--set {override}: stage {stage} has no fields")
    for axis in matrix.axes(fields):
        if matrix.inside(field, str(axis)):
            raise RecipeError(
                f"--set {override}: {axis} is an axis of the matrix of {stage}, with the values "
                f"{matrix.axes(fields)[axis]}; change them with --set {stage}.matrix.{axis}=[...]"
            )
    try:
        new = yaml.load(value, Loader=_StrictLoader)
        if field.startswith("matrix."):
            fields.setdefault("matrix", {})[field.removeprefix("matrix.")] = new
        else:
            matrix.set_field(fields, field, new)
    except _UNREADABLE as error:
        raise RecipeError(f"--set {override}: {str(error).removeprefix('line 1: ')}") from None


def _jobs(stages: Any) -> dict[str, str]:
    """Return {stage: job} of the stages of a recipe as read from YAML."""
    named = stages if isinstance(stages, dict) else {}
    return {str(name): str(stage.get("job")) if isinstance(stage, dict) else "" for name, stage in named.items()}


def _override_of(field: str, overrides: tuple[str, ...]) -> str | None:
    """Return the last override that set a field, an axis that has it, or a field that contains it."""
    set_by = {override: override.partition("=")[0].replace(".matrix.", ".", 1) for override in overrides}
    matches = [override for override, path in set_by.items() if f"{field}.".startswith(f"{path}.")]
    return matches[-1] if matches else None


def _explain(raw: dict[str, Any], problem: Mapping[str, Any], overrides: tuple[str, ...]) -> str:
    """Explain an error in one line: the field, the value, and what is expected."""
    path: list[str] = []
    at: Any = raw
    parts, kind = [*map(str, problem["loc"])], problem["type"]
    if kind.startswith("union_tag"):  # for a job or a kind, pydantic's path lacks the field
        parts.append(problem["ctx"]["discriminator"].strip("'"))
    for number, part in enumerate(parts, 1):
        # pydantic's path also has parts that are not in YAML: the member of a union that it tried (a job, kind or type)
        is_missing = kind in {"missing", "union_tag_not_found"} and number == len(parts)
        if isinstance(at, dict) and (part in at or is_missing):
            at = at.get(part)
        elif isinstance(at, list) and part.isdecimal() and int(part) < len(at):
            at = at[int(part)]
        elif not (isinstance(at, list) and is_missing):
            continue
        path.append(part)
    where = ".".join(path)
    field = ".".join([*map(base, path[1:2]), *path[2:]])  # as --set names it
    if (override := _override_of(field, overrides)) is not None:
        where = f"--set {override}" if override.startswith(f"{field}=") else f"--set {override}: {field}"
    if kind == "extra_forbidden":
        return f"{where}: there is no such field{_meant(raw, problem, path, override is not None)}"
    if kind in {"missing", "union_tag_not_found"}:
        is_field = path[0] == "stages" and field and not path[-1].isdecimal()
        remedy = f"; write it there, or --set {field}=..." if is_field else ""
        return f"{where}: is missing{remedy}"
    if kind == "union_tag_invalid":
        names = re.findall(r"'([^']*)'", problem["ctx"]["expected_tags"])
        return f"{where}: unknown {path[-1]} {at!r}{nearest(str(at), names)}"
    if kind == "literal_error":
        return f"{where}: unknown value {at!r}{_nearest_name(problem, path)}"
    message = reason(problem)
    if kind.startswith("value_error"):
        return f"{where}: {message}" if where else message
    return f"{where}: {message}, not {problem['input']!r}"


def _nearest_name(problem: Mapping[str, Any], path: list[str]) -> str:
    """Return '; did you mean ...?' for a wrong name in a field, which may be the name of another field."""
    names, wrong = problem["ctx"]["names"], str(problem["input"])
    fields = STAGE_TYPES[problem["loc"][2]].model_fields if len(path) == 3 else {}
    of_names, of_fields = nearest(wrong, names), nearest(wrong, fields)
    if "did you mean" in of_fields and "did you mean" not in of_names:
        return of_fields.replace("mean '", "mean the field '")
    return of_names


def _meant(raw: dict[str, Any], problem: Mapping[str, Any], path: list[str], is_set: bool) -> str:
    """Return '; did you mean ...?' for an unknown field at a path, as --set names it if that set it."""
    *parents, name = path
    if not parents:
        is_stage = isinstance(raw[name], dict) and "job" in raw[name]
        return f"; did you mean 'stages.{name}'?" if is_stage else nearest(name, Pipeline.model_fields)
    stage, is_inner = STAGE_TYPES[problem["loc"][2]], len(path) > 3
    for meant in _MEANT.get(name.lower().replace("-", "_"), ()):
        if meant.partition(".")[0] in stage.model_fields:
            remark = _REMARKS.get(meant, "")
            return f"; did you mean '{f'{base(path[1])}.' * (is_set or is_inner)}{meant}'?{remark}"
    if name in STAGE_TYPES and not is_inner:
        return f"; it is a job: write another stage with job: {name}"
    fields = _fields(stage, problem["loc"][3:-1]) if is_inner else [*stage.model_fields, "matrix"]
    owner = ".".join([base(path[1]), *path[2:-1], ""]) if is_set else ""
    return nearest(name, fields).replace("mean '", f"mean '{owner}")


def _fields(model: type[BaseModel], place: tuple[str | int, ...]) -> list[str]:
    """Return the fields at a place inside a model, a path from a pydantic error."""
    options: list[type[BaseModel]] = []
    for part in place:
        if part in model.model_fields:
            options = list(_models(model.model_fields[part].annotation))
        else:  # the name of a union's member
            options = [each for each in options if part in _tags(each)] or options
        if len(options) == 1:
            [model] = options
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _tags(model: type[BaseModel]) -> set[str]:
    """Return the values of the fields by which a union's models are told apart."""
    fields = (model.model_fields.get(name) for name in ("kind", "family"))
    return {tag for field in fields if field is not None for tag in get_args(field.annotation)}
