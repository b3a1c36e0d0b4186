"""Pin the models of a recipe that are on the Hugging Face hub to their commits."""

from __future__ import annotations

from collections.abc import Iterable

from pipelines.recipe.pipeline import Pipeline
from pipelines.spec import Import


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
