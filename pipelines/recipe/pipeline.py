"""A pipeline: stages that name each other as inputs, their order, and the selection of stages by name."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from pipelines.spec import (
    HUB_PATH,
    LATEST,
    TRAINED,
    WITHOUT_LABELS,
    AnyStage,
    Detect,
    Finetune,
    Import,
    Ingest,
    Predict,
    Pretrain,
    RecipeError,
    Segment,
    Stage,
    input_fields,
    nearest,
    step_of,
)
from vit_model.fields import Frozen


class Pipeline(Frozen):
    """Stages by name; a stage names others as its inputs. Their order in the file has no meaning.

    A stage with a `matrix` is expanded into its members, such as pretrain@width=32,seed=0 (`pipelines.recipe.matrix`).
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,40}$")
    description: str = ""
    stages: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,40}(@[A-Za-z0-9_.,=+-]+)?$")], Stage] = Field(
        min_length=1
    )

    @model_validator(mode="after")
    def _inputs_exist_and_fit(self) -> Self:
        for name, stage in self.stages.items():
            kinds = input_fields(type(stage))
            for field, inputs in stage.inputs().items():
                for source in inputs:
                    self._check_input(f"stages.{name}.{field}", source, kinds[field])
            for field, checkpoint in stage.checkpoints().items():
                (source,) = stage.inputs()[field]
                self._check_checkpoint(f"stages.{name}.{field}", source, checkpoint)
            self._check_labels(name, stage)
            if stage.inputs().get("init_from") == (name,):
                raise ValueError(
                    f"stages.{name}.init_from: a stage cannot start from its own result; latest is the newest model"
                    " that it has made in earlier runs"
                )
            if isinstance(stage, Pretrain) and stage.init_from == LATEST and LATEST in self.stages:
                raise ValueError(
                    f"stages.{name}.init_from: latest means the newest model of this stage in the store, but a stage is"
                    " called latest, too; rename that stage"
                )
        self.order()
        for name, stage in self.stages.items():
            if isinstance(stage, Pretrain):
                for field, check in (("init_from", self._check_start), ("teacher", self._check_teacher)):
                    for source in stage.inputs().get(field, ()):
                        check(f"stages.{name}.{field}: {source}", stage, source)
        return self

    def _check_start(self, where: str, stage: Pretrain, source: str) -> None:
        """Raise ValueError if a pretraining's model cannot take over a stage's weights, as far as the recipe says."""
        start = self.stages[source]
        while isinstance(start, Pretrain | Finetune) and start.model is None:  # its start has the same shape
            sources = start.inputs().get("backbone" if isinstance(start, Finetune) else "init_from")
            if sources is None:
                return  # a model of the store
            start = self.stages[sources[0]]
        if isinstance(start, Pretrain | Finetune) and start.model is not None and start.resolution is not None:
            # Classes may differ, and a model takes over its start's number of channels.
            stage.check_start(where, start.model.architecture(start.resolution, 3, 0))

    def _check_teacher(self, where: str, stage: Pretrain, source: str) -> None:
        """Raise ValueError if a pretraining cannot imitate a stage's model, as far as the recipe says."""
        teacher = self.stages[source]
        if isinstance(teacher, Pretrain | Finetune):  # others are weights from outside
            has_classifier = isinstance(teacher, Finetune) or teacher.objective not in WITHOUT_LABELS
            stage.check_teacher(where, teacher.resolution, has_classifier)

    def _check_input(self, where: str, source: str, kinds: tuple[str, ...]) -> None:
        if source not in self.stages:
            raise ValueError(f"{where}: {unknown_stage(source, self.jobs())}")
        kind = self.stages[source].KIND
        if kind not in kinds:
            fitting = dict.fromkeys(base(name) for name, stage in self.stages.items() if stage.KIND in kinds)
            raise ValueError(
                f"{where}: {source} is {'an' if kind[0] in 'aeiou' else 'a'} {kind}; "
                f"expected a {' or '.join(kinds)} ({', '.join(fitting) or 'the recipe has none'})"
            )

    def _check_labels(self, name: str, stage: AnyStage) -> None:
        """Raise ValueError if a stage needs labels that its images do not have, or predicts without a classifier."""
        inputs = stage.inputs()
        for source in inputs.get("data", ()):
            data = self.stages[source]
            if stage.uses_labels() and isinstance(data, Ingest) and not data.source.has_labels:
                raise ValueError(
                    f"stages.{name}.data: {source} has no labels (source.labels: false, or mask_classes), but"
                    f" {stage.job} needs them;"
                    f" use embed, or pretrain with objective {', '.join(WITHOUT_LABELS)} and no fewshot"
                )
            is_multi_label = isinstance(data, Ingest) and data.source.has_several_labels
            if is_multi_label and (why := stage.needs_one_label()) is not None:
                raise ValueError(f"stages.{name}.data: {source} has several labels per image, but {why}")
            if isinstance(stage, Detect) and isinstance(data, Ingest) and not data.source.has_boxes:
                raise ValueError(
                    f"stages.{name}.data: {source} has no boxes of objects: its source needs `boxes`, or kind scenes"
                )
            is_of_masks = isinstance(stage, Segment) or (isinstance(stage, Finetune) and stage.masks)
            if is_of_masks and isinstance(data, Ingest) and not data.source.has_masks:
                raise ValueError(
                    f"stages.{name}.data: {source} has no masks: its source needs `mask_classes`, or `masks: true`"
                )
        for source in inputs.get("backbone", ()) if isinstance(stage, Predict) else ():
            model = self.stages[source]
            if isinstance(model, Pretrain) and model.objective in WITHOUT_LABELS:
                raise ValueError(
                    f"stages.{name}.backbone: {source} has no classifier, because objective {model.objective} trains"
                    " none; use embed, or fine-tune it"
                )

    def _check_checkpoint(self, where: str, source: str, checkpoint: str) -> None:
        """Raise ValueError if a stage does not keep this checkpoint."""
        stage, step = self.stages[source], step_of(checkpoint)
        where = f"{where}.checkpoint: {checkpoint}"
        if not isinstance(stage, Pretrain):
            raise ValueError(
                f"{where} is for a pretrain stage; {source} has job {stage.job} and one set of weights, so write"
                f" only its name, {source}"
            )
        if step is None:
            if stage.objective in WITHOUT_LABELS:
                raise ValueError(
                    f"{where} is chosen by dev accuracy, which {source} with objective {stage.objective} does not"
                    " measure; use last or step:N"
                )
        elif step > stage.steps:
            raise ValueError(f"{where}, but {source} has {stage.steps} steps")
        elif step not in (*stage.keep_steps, stage.steps):
            kept = ", ".join(f"step:{kept}" for kept in (*stage.keep_steps, stage.steps))
            keep = sorted({*stage.keep_steps, step})
            raise ValueError(f"{where}, which {source} does not keep (it keeps {kept}); give it keep_steps: {keep}")

    def order(self) -> tuple[str, ...]:
        """Return the stages' names, each after its inputs; ties in the order of the file."""
        return running_order(self.graph())

    def graph(self) -> dict[str, list[str]]:
        """Return {stage: its inputs}."""
        return {
            name: [source for sources in stage.inputs().values() for source in sources]
            for name, stage in self.stages.items()
        }

    def jobs(self) -> dict[str, str]:
        """Return {stage: its job}."""
        return {name: stage.job for name, stage in self.stages.items()}

    def longest_paths(self) -> dict[str, int]:
        """Return, for each stage, the number of stages on the longest path that begins with it."""
        lengths = dict.fromkeys(self.stages, 1)
        graph = self.graph()
        for name in reversed(self.order()):
            for source in graph[name]:
                lengths[source] = max(lengths[source], lengths[name] + 1)
        return lengths

    def needed_for(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        """Return the targets (see `members`) and all stages that they need, in running order.

        Raises:
            RecipeError: a target is not a stage of this pipeline.
        """
        graph, jobs = self.graph(), self.jobs()
        needed: set[str] = set()
        pending = [name for target in targets for name in members(target, jobs)]
        while pending:
            name = pending.pop()
            if name not in needed:
                needed.add(name)
                pending += graph[name]
        return tuple(name for name in running_order(graph) if name in needed)


def running_order(graph: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Return the names in a graph, each after those that it depends on.

    Raises:
        RecipeError: there is a cycle.
    """
    try:
        return tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise RecipeError(f"stages: a cycle, {' -> '.join(reversed(error.args[1]))}") from None


def stage_name(path: str) -> str:
    """Derive the name of an import's stage from the last part of its path, without a revision."""
    path = match["repository"] if (match := re.fullmatch(HUB_PATH, path)) else path
    last = path.rstrip("/").rpartition("/")[2].removesuffix(".npz").removesuffix(".safetensors")
    return re.sub(r"[^a-z0-9]+", "_", last.lower()).lstrip("_0123456789")[:40].rstrip("_") or "model"


def base(name: str) -> str:
    """Return the name of a stage in the recipe: pretrain for pretrain@width=32."""
    return name.partition("@")[0]


def members(selector: str, names: Collection[str]) -> tuple[str, ...]:
    """Return the stages that a selector matches: one by name, or all (pretrain) or some (pretrain@seed=1) of a matrix.

    Args:
        names: the names of all stages; with {stage: job}, an error message can also suggest a stage by its job.

    Raises:
        RecipeError: no stage matches.
    """
    if selector in names:
        return (selector,)
    wanted = set(filter(None, selector.partition("@")[2].split(",")))
    matches = tuple(
        name
        for name in names
        if "@" in name and base(name) == base(selector) and wanted <= set(name.partition("@")[2].split(","))
    )
    if not matches:
        raise RecipeError(unknown_stage(selector, names))
    return matches


def unknown_stage(selector: str, names: Iterable[str]) -> str:
    """Return the message that no stage matches a selector, with the nearest name."""
    stages = list(names)
    parts = {
        part
        for name in stages
        if base(name) == base(selector) and "@" in name
        for part in name.partition("@")[2].split(",")
    }
    if parts:
        wanted = selector.partition("@")[2]
        return f"{base(selector)} has no member {wanted!r}{nearest(wanted, sorted(parts))}"
    jobs = names if isinstance(names, Mapping) else {}
    trained = TRAINED if selector == "train" else (selector,)
    same = dict.fromkeys(base(name) for name, job in jobs.items() if job in trained)
    hint = f"; with job {' or '.join(trained)} there are: {', '.join(same)}"
    return f"no stage is called {selector!r}{hint if same else nearest(selector, dict.fromkeys(map(base, stages)))}"


def pin(pipeline: Pipeline, names: Iterable[str]) -> Pipeline:
    """Return the pipeline with each of these stages' paths on the Hugging Face hub pinned to a commit.

    Raises:
        RecipeError: there is no such model or revision. StoreUnreachable: the hub does not answer.
    """
    hub = {
        name: stage
        for name in names
        if isinstance(stage := pipeline.stages[name], Import) and stage.path.startswith("hf:")
    }
    if not hub:
        return pipeline
    from pipelines.files.hub import pinned

    stages = {name: stage.model_copy(update={"path": pinned(stage.path)}) for name, stage in hub.items()}
    return pipeline.model_copy(update={"stages": pipeline.stages | stages})
