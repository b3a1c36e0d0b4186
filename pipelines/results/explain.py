"""`vitflow explain A B`: why do two results of the same task differ? A is repeated with one field of B at a time.

In: the manifests of two results, and the recipes of the runs that made them. Out: the `Difference`s between their
protocols, a pipeline that repeats A with each of them, and a table of their contributions.

A field belongs to the stage itself (an evaluation or a fine-tuning), or to its dataset or imported model. Other inputs
are exchanged whole. Stages that both sides share are cached, so only the repetitions run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipelines.engine.runs import load_run
from pipelines.recipe.load import parse_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.results.lookup import find_manifests
from pipelines.results.sql.query import query
from pipelines.spec import FINE_TUNED, AnyStage, RecipeError
from pipelines.spec.search import placed
from pipelines.store import Manifest, Store, read_manifest
from vit_model.errors import reasons
from vit_model.fields import Frozen, marks

EXPLAINED = ("evaluate", "segment", *FINE_TUNED)
_BY_FIELD = ("ingest", "import")  # inputs whose fields are exchanged one by one
TOGETHER = "together"  # the stage with every difference
LITERATURE = {
    "backbone.preprocessing": "Repositories for VTAB-1k normalise AugReg's ViTs with ImageNet's mean and std, but"
    " they were trained with 0.5 (ZhangYuanhan-AI/NOAH, JieShibo/PETL-ViT issue 14).",
    "data.source.pixels": "The VTAB-1k image folders that most repositories use hold JPEGs that were encoded again;"
    " the conversion alone moves CIFAR-100 from 70 to 80% (visinf/adapter_plus issue 3).",
    "eval_crop": "VTAB's code resizes to the square, bilinear; the PyTorch repositories take PIL's bicubic resize;"
    " big_vision crops the middle.",
    "protocol": "big_vision fixes L2 at 1,024; scenic chooses it on test, over all data sets at once.",
    "support": "VTAB's scores are of models trained on train800 and val200 together.",
    "lora": "Published LoRA rows for VTAB-1k change different matrices with the same number of weights: queries and"
    " values (JieShibo/PETL-ViT, binary_adapter/lora.py), all three from one A (ZhangYuanhan-AI/NOAH), queries and keys"
    " (visinf/adapter_plus, conf/lora). The first two report the best epoch on test.",
    "freeze": "If tuned as carefully, training biases alone is about as good on VTAB-1k as other methods with few"
    " weights, although it was reported inferior (arXiv 2409.16434).",
    "resolution": "The paper fine-tunes at 384 pixels; most repositories at 224.",
}
"""Known effects of a field in published results, by a prefix of its name."""


class Side(NamedTuple):
    """A result, and the pipeline of the run that made it."""

    manifest: Manifest
    pipeline: Pipeline

    @property
    def stage(self) -> AnyStage:
        """The stage that made the result."""
        return self.pipeline.stages[self.manifest.stage]

    def input_name(self, field: str) -> str:
        """Return the name of an input: a stage's, latest or an alias."""
        return self.stage.from_store().get(field) or self.input(field)[0]

    def input(self, field: str) -> tuple[str, AnyStage]:
        """Return the name and the stage of an input."""
        (name,) = self.stage.inputs()[field]
        return name, self.pipeline.stages[name]


class Difference(NamedTuple):
    """A field in which the protocols of two results differ, and its values."""

    role: str
    """"" for the stage itself; else the field of the input, such as data"""
    path: str
    """such as eval_crop.crop; "" for the whole input"""
    a: Any
    b: Any

    @property
    def name(self) -> str:
        """The name in messages."""
        return ".".join(filter(None, (self.role, self.path)))


def find_side(store: Store, selector: str) -> Side:
    """Return the result that a key, a unique key prefix or RUN/STAGE matches.

    Raises:
        RecipeError: none or several match, or its run's recipe cannot be read.
    """
    matches = find_manifests(store, selector)
    found = [manifest for manifest in matches if manifest.job in EXPLAINED]
    if len(found) != 1:
        jobs = ", ".join(sorted({manifest.job for manifest in matches} - set(EXPLAINED)))
        stages = f"{len(found)} stages of {', '.join(EXPLAINED)}"
        matched = stages if found or not jobs else f"results of {jobs} only"
        raise RecipeError(
            f"{selector}: matches {matched}; expected one of {', '.join(EXPLAINED)}, by its key or RUN/STAGE."
            " `vitflow report compare` compares the accuracies of any two results"
        )
    side = Side(found[0], load_run(store, found[0].run).pipeline)
    if found[0].stage not in side.pipeline.stages:
        raise RecipeError(f"{selector}: the recipe of {found[0].run} has no stage {found[0].stage}")
    return side


def differences(store: Store, a: Side, b: Side) -> list[Difference]:
    """Return the fields in which the protocols differ.

    Raises:
        RecipeError: one is an evaluation and the other a fine-tuning.
    """
    if a.manifest.job != b.manifest.job:
        raise RecipeError(
            f"{a.manifest.stage} is of job {a.manifest.job} and {b.manifest.stage} of job {b.manifest.job}; they are"
            " different methods, so no field explains the difference"
        )
    found = [Difference("", *each) for each in _leaves(a.stage, b.stage)]
    for role in dict.fromkeys([*a.manifest.inputs, *b.manifest.inputs]):
        ours, theirs = (side.manifest.inputs.get(role) for side in (a, b))
        if ours and theirs and ours[0].content_digest == theirs[0].content_digest:
            continue
        if not (ours and theirs) or any(role in side.stage.from_store() for side in (a, b)):
            found = [each for each in found if (role, each.name) != ("backbone", "model")]
            starts = [
                side.input_name(role) if used else _plain(side.stage, "model")
                for side, used in ((a, ours), (b, theirs))
            ]
            found.append(Difference(role, "", *starts))
            continue
        (name, one), (other_name, other) = a.input(role), b.input(role)
        manifests = [read_manifest(store, used[0].job, used[0].key) for used in (ours, theirs)]
        sources = [manifest and manifest.source for manifest in manifests]
        leaves = [*_leaves(one, other)] if one.job == other.job else []
        if one.job in _BY_FIELD and sources[0] == sources[1] and leaves:
            found += [Difference(role, *each) for each in leaves]
        else:
            values = [f" ({', '.join(f'{path} {of[side]}' for path, *of in leaves)})" * bool(leaves) for side in (0, 1)]
            found.append(Difference(role, "", name + values[0], other_name + values[1]))
    return found


def _leaves(a: Frozen, b: Frozen, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value of a, value of b) of the fields that change a result and differ, without inputs.

    Values are as in a recipe; a part that only one side has, or that is of another kind, is whole, without defaults.
    """
    for name in dict.fromkeys([*_fields(a), *_fields(b)]):
        one, other = getattr(a, name, None), getattr(b, name, None)
        if isinstance(one, Frozen) and isinstance(other, type(one)):
            yield from _leaves(one, other, f"{prefix}{name}.")
        elif one != other:
            yield f"{prefix}{name}", _plain(a, name), _plain(b, name)


def _fields(model: Frozen) -> list[str]:
    """Return the names of the fields that change a stage's result, without its inputs."""
    return [
        name
        for name, info in type(model).model_fields.items()
        if not (marks(info).get("execution") or marks(info).get("input"))
    ]


def _plain(model: Frozen, name: str) -> Any:
    """Return a field's value as in a recipe; None if the model has no such field."""
    value = getattr(model, name, None)
    if isinstance(value, Frozen):
        return value.model_dump(mode="json", exclude_defaults=True)
    return model.model_dump(mode="json", include={name}).get(name)


class Repetitions(NamedTuple):
    """A pipeline with both results and A with B's value of each difference, and with all of them."""

    pipeline: Pipeline
    a: str
    b: str
    alone: dict[str, str]
    """name of a difference -> stage"""
    impossible: dict[str, str]
    """name of a difference that cannot be exchanged alone -> why"""
    together: str | None
    """the stage with all differences, if there are several"""

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of both results and of all repetitions."""
        return (self.a, self.b, *self.alone.values(), *([self.together] if self.together else []))


def repetitions(a: Side, b: Side, found: Sequence[Difference]) -> Repetitions:
    """Return the pipeline that measures the effects of these differences."""
    stages = _prefixed(a, "a_") | _prefixed(b, "b_")
    own = stages[f"a_{a.manifest.stage}"]
    alone, impossible = {}, {}
    groups = {each.name: [each] for each in found}
    if len(found) > 1:
        groups[TOGETHER] = list(found)
    for number, (name, group) in enumerate(groups.items(), 1):
        last = name.rsplit(".", 1)[-1].lower()[:16]
        stage = TOGETHER if name == TOGETHER else f"a_with_{number}_{re.sub(r'[^a-z0-9]+', '_', last)}"
        changed = _changed(stage, own, stages, b, group)
        try:
            for each, fields in changed.items():
                copied = a.stage if each == stage else a.input(each.removeprefix(f"{stage}_"))[1]
                type(copied).model_validate(fields)
        except ValidationError as error:
            impossible[name] = reasons(error)
            continue
        stages |= changed
        if name != TOGETHER:
            alone[name] = stage
    raw = {"name": "explain", "description": "One field at a time, of two results.", "stages": stages}
    pipeline = parse_pipeline(raw, f"explain {a.manifest.key[:12]} {b.manifest.key[:12]}")
    names = (f"a_{a.manifest.stage}", f"b_{b.manifest.stage}")
    return Repetitions(pipeline, *names, alone, impossible, TOGETHER if TOGETHER in stages else None)


def no_repetitions(a: Side, b: Side) -> Repetitions:
    """Return the two results without repetitions, if no field can explain their difference."""
    return Repetitions(a.pipeline, f"a_{a.manifest.stage}", f"b_{b.manifest.stage}", {}, {}, None)


def _prefixed(side: Side, prefix: str) -> dict[str, dict[str, Any]]:
    """Return a result's stage and the stages that it needs, as in a recipe, with a prefix to their names."""
    stages = {}
    for name in side.pipeline.needed_for((side.manifest.stage,)):
        stage = side.pipeline.stages[name]
        fields = stage.model_dump(mode="json")
        for field in stage.inputs():
            fields[field] = _renamed(fields[field], prefix)
        stages[f"{prefix}{name}"] = fields
    return stages


def _renamed(value: Any, prefix: str) -> Any:
    """Return a reference to other stages ({stage, checkpoint}, a name or several) with a prefix."""
    if isinstance(value, list):
        return [_renamed(each, prefix) for each in value]
    return value | {"stage": f"{prefix}{value['stage']}"} if isinstance(value, dict) else f"{prefix}{value}"


def _changed(
    name: str,
    own: Mapping[str, Any],
    stages: Mapping[str, dict[str, Any]],
    b: Side,
    group: Sequence[Difference],
) -> dict[str, dict[str, Any]]:
    """Return the stage `name`, A with these differences, and the changed inputs that it needs."""
    fields, inputs = dict(own), {}
    for role in dict.fromkeys(each.role for each in group):
        paths = {each.path: each.b for each in group if each.role == role}
        if not role:
            fields = placed(fields, paths)
        elif "" in paths:
            names = [role, *(["model"] if role == "backbone" and "model" in fields else [])]
            fields |= {field: stages[f"b_{b.manifest.stage}"].get(field) for field in names}
        else:
            source = own[role]["stage"] if isinstance(own[role], dict) else own[role]
            inputs[f"{name}_{role}"] = placed(stages[source], paths)
            fields[role] = f"{name}_{role}"
    return {name: fields, **inputs}


# ------------------------------------------------------------------------------------------------- contributions


class Setting(NamedTuple):
    """The conditions under which a result has one number."""

    protocol: str
    """without the name of the variant, which may differ between two results"""
    labels_per_class: int | None
    scored: str = ""
    """"" for all of test by its labels; else the ReaL labels, the part of test, or both"""
    metric: str = "accuracy"


def measured(store: Store, artifacts: Mapping[str, str]) -> dict[str, dict[Setting, float]]:
    """Return the mean accuracy, mAP, AP or mIoU of the model's rows, without baselines, by stage and setting.

    Args:
        artifacts: stage -> key of its artifact.
    """
    sql = """
        SELECT artifact, split_part(protocol, ',', 1), labels_per_class,
               concat_ws(', ', nullif(regexp_extract(task, '[(](ReaL)[)]$', 1), ''),
                         nullif(regexp_extract(method, 'on test images (not )?seen in training'), '')),
               metric, avg(value)
        FROM rows
        WHERE split = 'test' AND metric IN ('accuracy', 'mAP', 'AP', 'mIoU')
              AND regexp_matches(method, 'pretrained|trained on these images|from scratch')
        GROUP BY ALL"""
    found: dict[str, dict[Setting, float]] = {}
    with query(store, sql) as answer:
        for key, *setting, value in answer.rows:
            found.setdefault(key, {})[Setting(*setting)] = value
    return {stage: found.get(key, {}) for stage, key in artifacts.items()}


def attributed(
    plan: Repetitions, found: Sequence[Difference], values: Mapping[str, Mapping[Setting, float]]
) -> list[dict[str, Any]]:
    """Return the contribution of each difference, for each setting that both results measured.

    If they have no setting in common, each result has separate lines, without contributions.

    {protocol, labels_per_class, scored, metric, a, b, fields: [{field, a, b, effect, note}], together, rest}: numbers
    are fractions, null if not measured. `effect` is A with B's value of this field, minus A. The largest comes first.
    `together` is A with all of them, minus A. `rest` is b - a minus the sum of the effects: interactions of fields, and
    the unexplained part.
    """
    both = values[plan.a], values[plan.b]
    settings = sorted(
        both[0].keys() & both[1].keys() or both[0].keys() | both[1].keys(),
        key=lambda each: (each.scored, each.protocol, each.labels_per_class or math.inf, each.metric),
    )
    lines = []
    for setting in settings:
        start, end = (side.get(setting) for side in both)
        known = {stage: own[setting] for stage, own in values.items() if setting in own}
        effects = {} if start is None else {stage: value - start for stage, value in known.items()}
        fields = [
            {
                "field": field.name,
                "a": field.a,
                "b": field.b,
                "effect": effects.get(plan.alone.get(field.name, "")),
                "note": plan.impossible.get(field.name),
            }
            for field in found
        ]
        explained = sum(field["effect"] or 0.0 for field in fields)
        lines.append(
            {
                **setting._asdict(),
                "a": start,
                "b": end,
                "fields": sorted(fields, key=lambda field: -abs(field["effect"] or 0.0)),
                "together": effects.get(plan.together or ""),
                "rest": None if start is None or end is None else end - start - explained,
            }
        )
    return lines


def literature(found: Sequence[Difference]) -> list[str]:
    """Return the known effects of these fields in published results."""
    return [
        f"{prefix}: {text}"
        for prefix, text in LITERATURE.items()
        if any(field.name == prefix or field.name.startswith(f"{prefix}.") for field in found)
    ]
