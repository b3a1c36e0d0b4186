"""Provenance: how each stage was run, from the manifests.

In: (stage, manifest, folder) of each input. Out: plain dictionaries and sentences.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipelines.identity import identity_fields
from pipelines.spec import (
    BEST,
    STAGE_TYPES,
    AnyStage,
    Finetune,
    Import,
    Ingest,
    Stage,
    recorded_checkpoint,
    step_of,
)
from pipelines.spec.published import Published, published
from pipelines.store import Manifest, Store, StoreDamaged, read_manifest
from vit_model.fields import Frozen

Part = tuple[str, Manifest, Path]
OPEN = ("seed", "refits", "dtype", "seen_in_training")  # fields that no published protocol names
DEFAULTS = "defaults"  # shown for a group of fields that is set, with all fields at their defaults


def stages(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return a record per stage: key, inputs, duration, metrics, seeds, configuration, settings, code."""
    names = {manifest.key: stage for stage, manifest, _ in parts}
    return [
        {
            "stage": stage,
            "job": manifest.job,
            "kind": manifest.kind,
            "artifact": manifest.key,
            "inputs": {
                field: [reference.key for reference in references] for field, references in manifest.inputs.items()
            },
            "seconds": manifest.seconds,
            "earlier_seconds": manifest.earlier_seconds,
            "finished": manifest.finished,
            "metrics": manifest.metrics,
            "seeds": dict(_seeds(manifest.config)),
            "config": manifest.config,
            "description": (STAGE_TYPES[manifest.job].__doc__ or "").partition("\n")[0],
            "settings": [
                *_named_inputs(manifest, names),
                *settings(manifest.config),
                *_preprocessing(folder),
            ],
            "code": manifest.code,
            "timing_dependent": manifest.timing_dependent,
        }
        for stage, manifest, folder in parts
    ]


def settings(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return {field, value, description} of each identity field of a stage that differs from its default.

    If this version cannot read the configuration, return all recorded fields.
    """
    try:
        stage: AnyStage = TypeAdapter(Stage).validate_python(config)
    except ValidationError:
        return [_setting(name, value) for name, value in config.items() if name != "job"]
    return [setting for setting in changed_fields(stage) if setting["field"] != "job"]


def changed_fields(config: Frozen, base: Frozen | None = None) -> Iterator[dict[str, Any]]:
    """Yield the settings of a configuration that differ from `base`, or without it from the defaults."""
    for name, recorded in identity_fields(config).items():
        info, value = type(config).model_fields[name], getattr(config, name)
        default = info.get_default(call_default_factory=True, validated_data=vars(config))
        default = default if base is None else getattr(base, name)
        if value == default:
            continue
        if not isinstance(value, Frozen):
            yield _setting(name, recorded, info.description)
            continue
        group = list(changed_fields(value, default if type(default) is type(value) else None))
        yield from (setting | {"field": f"{name}.{setting['field']}"} for setting in group)
        if not group:
            yield _setting(name, DEFAULTS, info.description)


def _setting(field: str, value: Any, description: str | None = None) -> dict[str, Any]:
    return {"field": field, "value": value, "description": description or ""}


def _named_inputs(manifest: Manifest, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of a stage: the names of their stages, or their keys if a stage is not in the report."""
    for field, references in manifest.inputs.items():
        stages = [names.get(reference.key, reference.key[:12]) for reference in references]
        if stages:
            yield _setting(field, f"{', '.join(stages)}{at_checkpoint(manifest.config, field)}")


def _preprocessing(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a model's preprocessing, from its config.json."""
    if (path := folder / "config.json").is_file():
        contract = json.loads(path.read_text("utf-8"))
        pixels = contract.get("backbone", contract)["preprocessing"]  # a detector has its backbone's
        for name in ("resolution", "mean", "std"):
            yield _setting(f"pixels.{name}", pixels[name], "(x / 255 - mean) / std")


def backbones(parts: Sequence[Part]) -> dict[str, str]:
    """Return artifact -> the artifact of its backbone, of those that have one."""
    return {manifest.key: inputs[0].key for _, manifest, _ in parts if (inputs := manifest.inputs.get("backbone"))}


def published_protocol(store: Store, manifest: Manifest) -> Published | None:
    """Return the published accuracy whose protocol an artifact repeats; None if there is none, or an input is lost."""
    if manifest.job != "finetune":
        return None
    inputs = [each for field in ("data", "backbone") for each in manifest.inputs.get(field, ())]
    try:
        made = [manifest, *(read_manifest(store, each.job, each.key) for each in inputs)]
        stages = [TypeAdapter(Stage).validate_python(each.config) for each in made if each]
    except (ValidationError, StoreDamaged):
        return None
    match stages:
        case [Finetune() as tuned, Ingest() as ingest, Import() as backbone]:
            return same_protocol(tuned, ingest, backbone)
    return None


def same_protocol(tuned: Finetune, ingest: Ingest, backbone: Import) -> Published | None:
    """Return the published accuracy that agrees with these stages in every identity field but OPEN; None if none does.

    The authors publish no digest of their weights, so these are known by the name of their file.
    """

    def protocol(*stages: AnyStage) -> list[dict[str, Any]]:
        fields = [identity_fields(stage).items() for stage in stages]
        return [{name: value for name, value in each if name not in OPEN} for each in fields]

    ours, file = protocol(tuned, ingest, backbone), Path(backbone.path).name
    for row in published().values():
        if protocol(*row.stages()) == ours and file == row.weights and ingest.exclude is None:
            return row
    return None


def environments(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return each machine with its packages and the stages that ran there."""
    by_content: dict[str, dict[str, Any]] = {}
    for stage, manifest, _ in parts:
        content = json.dumps(manifest.environment, sort_keys=True)
        by_content.setdefault(content, {**manifest.environment, "stages": []})["stages"].append(stage)
    return list(by_content.values())


def seen_in_training(metrics: Mapping[str, float | int | str]) -> str:
    """Describe the overlap of an artifact's test images with training images; empty if it was not measured."""
    if "test_images_seen_in_training" not in metrics:
        return ""
    seen, shared, near = (
        metrics[f"test_images_{name}"] for name in ("seen_in_training", "also_in_train", "near_training_images")
    )
    counts = [f"{seen:,} test images" if seen else "unknown" if "unknown_training" in metrics else "none"]
    counts += [f"{shared:,} also in its own train or dev"] if shared else []
    counts += [f"{near:,} near-copies"] if near else []
    return f"seen in training: {', '.join(counts)}"


def at_checkpoint(config: Mapping[str, Any], field: str) -> str:
    """Describe the checkpoint of an input that a stage used; empty for the last checkpoint."""
    checkpoint = recorded_checkpoint(config, field)
    if checkpoint == BEST:
        return " at its best step on dev"
    return "" if (step := step_of(checkpoint)) is None else f" at step {step:,}"


def _seeds(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _seeds(value, f"{prefix}{name}.")
        elif name == "seed":
            yield f"{prefix}seed", value
