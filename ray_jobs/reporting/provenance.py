"""Provenance: how each stage was run, from the manifests.

In: (stage, manifest, folder) of each input. Out: plain dictionaries and sentences.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines.spec import BEST, objective_properties, recorded_checkpoint, step_of
from pipelines.store import Manifest
from vit_model.config import family_of

Part = tuple[str, Manifest, Path]
_SEEN = " A backbone that was trained on the labelled images is marked as such and left out of the verdict."


def stages(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return a record per stage: key, inputs, duration, metrics, seeds, configuration, code."""
    return [
        {
            "stage": stage,
            "job": manifest.job,
            "kind": manifest.kind,
            "artifact": manifest.key,
            "inputs": {
                field: [reference.key for reference in references]
                for field, references in manifest.inputs.items()
            },
            "seconds": _seconds(manifest),
            "finished": manifest.finished,
            "metrics": manifest.metrics,
            "seeds": dict(_seeds(manifest.config)),
            "config": manifest.config,
            "code": manifest.code,
            "timing_dependent": manifest.timing_dependent,
        }
        for stage, manifest, _ in parts
    ]


def environments(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return each machine and set of packages that was used, with the stages that ran there."""
    by_content: dict[str, dict[str, Any]] = {}
    for stage, manifest, _ in parts:
        content = json.dumps(manifest.environment, sort_keys=True)
        by_content.setdefault(content, {**manifest.environment, "stages": []})["stages"].append(stage)
    return list(by_content.values())


def protocols(parts: Sequence[Part]) -> list[dict[str, str]]:
    """Describe each stage that trained or measured something: its data, selection of settings and scoring."""
    names = {manifest.key: stage for stage, manifest, _ in parts}
    return [
        {"stage": stage, "artifact": manifest.key, "text": text}
        for stage, manifest, folder in parts
        if (text := _protocol(manifest, folder, names))
    ]


def _protocol(manifest: Manifest, folder: Path, names: Mapping[str, str]) -> str:
    config = manifest.config
    inputs = {
        field: f"{names.get(references[0].key, references[0].key[:12])}{at_checkpoint(config, field)}"
        for field, references in manifest.inputs.items()
        if references
    }
    descriptions = {
        "pretrain": _pretrain,
        "import": _import,
        "finetune": _finetune,
        "evaluate": _evaluate,
        "segment": _segment,
        "baselines": _baselines,
        "audit": _audit,
    }
    if manifest.job not in descriptions:
        return ""
    unknown = manifest.metrics.get("unknown_training")
    among = "these" if manifest.job == "audit" else "test"
    warning = (
        f" The training images of {unknown} are unknown; {among} images may be among them." if unknown else ""
    )
    return f"{descriptions[manifest.job](config, inputs)}{warning}{_normalisation(folder)}"


def seen_in_training(metrics: Mapping[str, float | int | str]) -> str:
    """Describe the overlap of an artifact's test images with training images; empty if it was not measured."""
    if "test_images_seen_in_training" not in metrics:
        return ""
    seen, shared, near = (
        metrics[f"test_images_{name}"]
        for name in ("seen_in_training", "also_in_train", "near_training_images")
    )
    counts = [f"{seen:,} test images" if seen else "unknown" if "unknown_training" in metrics else "none"]
    counts += [f"{shared:,} also in its own train or dev"] if shared else []
    counts += [f"{near:,} near-copies"] if near else []
    return f"seen in training: {', '.join(counts)}"


def at_checkpoint(config: Mapping[str, Any], field: str) -> str:
    """Describe the checkpoint of an input that a stage used; empty for the last one."""
    checkpoint = recorded_checkpoint(config, field)
    if checkpoint == BEST:
        return " at its best step on dev"
    return "" if (step := step_of(checkpoint)) is None else f" at step {step:,}"


def _pretrain(config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    optimizer = config["optimizer"]
    objective = objective_properties(config.get("objective", "softmax")).label
    if auxiliary := config.get("auxiliary"):
        objective += f" with masked patch prediction (weight {auxiliary['masked_patches']:g})"
    if "teacher" in inputs:
        settings = config["distillation"]
        at = f", temperature {settings['temperature']:g}" if settings["kind"] == "soft" else ""
        objective += f" ({settings['kind']}{at}, weight {settings['weight']:g}) of {inputs['teacher']}"
    start = f" from the weights of {inputs['init_from']}" if "init_from" in inputs else ""
    size = "the same model" if config["model"] is None else _size(config["model"])
    return (
        f"{objective} on the train split of {inputs['data']}{start}: {size}, resolution "
        f"{config['resolution']}, {config['steps']:,} steps of {config['batch_size']} images, learning rate "
        f"{config['learning_rate']:g}, weight decay {optimizer['weight_decay']:g}, {config['dtype']}, "
        f"ZeRO stage {config['zero_stage']}, augmentation {_augmentation(config)}, label smoothing "
        f"{config['label_smoothing']:g}, seed {config['seed']}."
    )


def _augmentation(config: Mapping[str, Any]) -> str:
    steps = [config["augment"]]
    if randaugment := config.get("randaugment"):
        steps.append(f"RandAugment ({randaugment['layers']} layers, magnitude {randaugment['magnitude']:g})")
    steps += [f"{name} (alpha {config[name]:g})" for name in ("mixup", "cutmix") if config.get(name)]
    return ", ".join(steps)


def _import(config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    return (
        f"Weights imported from {config['path']}. Unless they are those of a model in the store, their training images"
        " are unknown, and test images may be among them."
    )


def _finetune(config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    scratch = "backbone" not in inputs
    start = (
        f"from scratch ({_size(config['model'])})" if scratch else f"from the weights of {inputs['backbone']}"
    )
    return (
        f"Fine-tuning on {inputs['data']} {start}: {config['steps']:,} steps of {config['batch_size']} images, "
        f"augmentation {_augmentation(config)}; {_searched(config)}, {_selection(config['labels'])}. "
        f"{_trained(config)}{_stopping(config.get('early_stopping'))}Each {_fit(config)} is scored on test once."
        f"{_SEEN * (not scratch and config['labels']['per_class'] is not None)}"
    )


def _fit(config: Mapping[str, Any]) -> str:
    refits = config.get("refits", 1)
    return "draw" if refits == 1 else f"of {refits} refits, with seeds from {config['seed']} on,"


def _searched(config: Mapping[str, Any]) -> str:
    """Say what a fine-tuning selects from."""
    rates = ", ".join(f"{rate:g}" for rate in config["learning_rates"])
    if (search := config.get("search")) is None:
        return f"learning rate from {rates}"
    fields = [f"learning rate from {rates}"] if rates else []
    for path, values in search["over"].items():
        among = (
            f"{values['low']:g} to {values['high']:g}"
            if isinstance(values, dict)
            else ", ".join(map(str, values))
        )
        fields.append(f"{path.replace('_', ' ')} from {among}")
    if search["kind"] == "pbt":
        tried = f"population-based training of {search['members']} members, {search['rounds']} rounds"
        return f"{tried} ({'; '.join(fields)})"
    tried = (
        f"{search['kind']} search of {search['trials']} trials" if "trials" in search else "every combination"
    )
    return f"{tried} ({'; '.join(fields)})"


def _trained(config: Mapping[str, Any]) -> str:
    """Say what a fine-tuning with few trained weights trains."""
    if (lora := config.get("lora")) is not None:
        searched = (config.get("search") or {}).get("over", {})
        fixed = [
            f"{name} {' and '.join(value) if name == 'targets' else value}"
            for name, value in lora.items()
            if f"lora.{name}" not in searched
        ]
        return f"Only the head and LoRA's matrices are trained: {', '.join(fixed)}. "
    return "Only biases and the head are trained. " * (config.get("freeze") == "all_but_biases")


def _stopping(settings: Mapping[str, Any] | None) -> str:
    """Describe early stopping, if a fine-tuning has it."""
    if settings is None:
        return ""
    return (
        f"Trials were evaluated {settings['evaluations']} times and ended after {settings['patience']} evaluations "
        "without a better one; refits end at the step that was best there. "
    )


def _evaluate(config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    support = config.get("support", "train").replace("+", " and ")
    chosen = {
        "leave_one_out": "L2 is selected on the support alone, in the same way for every row.",
        "dev": "L2 is selected on dev after a fit to train; then both are fitted.",
        "big_vision": "Labels are drawn and L2 is 1,024 as in big_vision's fewshot_lsr.",
        "scenic": "As in scenic, the support is the first images of each class, and L2 is chosen on test.",
    }[config.get("protocol", "leave_one_out")]
    supports = []
    if config["shots"]:
        supports.append(f"{config['draws']} supports drawn from {support} (seed {config['seed']})")
    if config.get("linear_probe"):
        supports.append(f"all of {support}")
    classifiers = ", ".join(config.get("classifiers", ("least squares",)))
    retrieval = (
        " Retrieval: each test image ranks all other test images by cosine similarity, and those of its class are"
        " relevant."
    )
    return (
        f"Linear evaluation of {inputs['backbone']} (frozen) on {inputs['data']}: regularised least "
        f"squares from features to ±1 targets (Dosovitskiy et al., section 4.1), with {' and '.join(supports)}. "
        f"All of test is scored. {chosen}"
        f"{'' if classifiers == 'least squares' else f' Classifiers: {classifiers}.'}"
        f"{retrieval * config.get('retrieval', False)}{_crop(config.get('eval_crop'))}"
        f"{_resolution(config.get('resolution'))}{_SEEN}"
    )


def _segment(config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    return (
        f"Linear segmentation of {inputs['data']} by the patch tokens of {inputs['backbone']} (frozen): least squares"
        " from a patch's token to the classes of its pixels, with L2 and the classes' weights selected by mIoU on dev"
        " after a fit to train; then both are fitted. Images are squashed to the model's square; scores are resized to"
        f" the mask, bilinearly, and every pixel of test with a class is scored.{_SEEN}"
    )


def _crop(eval_crop: Mapping[str, Any] | None) -> str:
    """Describe how images become squares, if the stage overrides the model's contract."""
    if eval_crop is None:
        return ""
    kept = (
        f", and the middle {eval_crop['crop_fraction']:.1%} of it" if eval_crop["crop_fraction"] < 1 else ""
    )
    how = {"bicubic": " (bicubic)", "bilinear_aliased": " (bilinear, without antialiasing)"}
    interpolation = how.get(eval_crop.get("interpolation") or "", "")
    if eval_crop["crop"] == "squash":
        return f" Images are squashed to a square{kept}{interpolation}."
    return f" Images are cropped to the centre square{kept}{interpolation}."


def _resolution(resolution: int | None) -> str:
    return "" if resolution is None else f" Images are {resolution} pixels wide and high."


def _baselines(config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    return (
        f"Classifiers on the pixels of {inputs['data']} (scikit-learn; larger images are reduced to "
        f"{config['thumbnail']} pixels per side): settings {_selection(config['labels'])}. "
        f"Images are not augmented. With all labels, at most {config['max_images']:,} images are used. "
        "Each draw is scored on test once."
    )


def _audit(config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    fit = config["cross_validation"]
    if fit is None:
        source = f"leave-one-out least squares on the frozen features of {inputs['backbone']}"
    else:
        scratch = "backbone" not in inputs
        start = (
            f"from scratch ({_size(fit['model'])})"
            if scratch
            else f"from the weights of {inputs['backbone']}"
        )
        source = (
            f"{fit['folds']} fits {start}, each on all folds but one: {fit['steps']:,} steps of {fit['batch_size']} "
            f"images, learning rate {fit['learning_rate']:g}, augmentation {_augmentation(fit)}"
        )
    return (
        f"Likely wrong labels in train and dev of {inputs['data']}, by confident learning (Northcutt et al., 2021) on "
        f"out-of-sample probabilities from {source}. Test is not audited."
    )


def _selection(labels: Mapping[str, Any]) -> str:
    if not labels.get("use_dev", True):
        return "selected by cross-validation in train, if there are several, then fitted on train without dev"
    if labels["per_class"] is None:
        return "selected on dev, then fitted on train and dev (without dev: selected by cross-validation in train)"
    return (
        f"selected by {labels['folds']}-fold cross-validation inside the first draw of {labels['per_class']} "
        f"labels per class and used for all {labels['draws']} draws from train (seed {labels['seed']})"
    )


def _normalisation(folder: Path) -> str:
    """Describe the preprocessing of a model's images, from its contract."""
    if not (folder / "config.json").is_file():
        return ""
    pixels = json.loads((folder / "config.json").read_text("utf-8"))["preprocessing"]
    mean, std = (", ".join(f"{value:.3g}" for value in pixels[name]) for name in ("mean", "std"))
    return (
        f" Pixels: resolution {pixels['resolution']}, (x / 255 − mean) / std with mean {mean} and std {std}."
    )


def _size(model: Mapping[str, Any]) -> str:
    units = "-".join(map(str, model.get("units") or model.get("stem") or ()))
    if family_of(model) == "resnet":
        return f"ResNet of {units} units, width factor {model['width_factor']}"
    heads, patch = model["num_heads"], model["patch_size"]
    stem = f" on a convolutional stem ({units or 'no'} units)" if model.get("stem") is not None else ""
    return f"ViT of width {model['width']}, depth {model['depth']}, {heads} heads, patch {patch}{stem}"


def _seconds(manifest: Manifest) -> float:
    return (
        datetime.fromisoformat(manifest.finished) - datetime.fromisoformat(manifest.started)
    ).total_seconds()


def _seeds(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _seeds(value, f"{prefix}{name}.")
        elif name == "seed":
            yield f"{prefix}seed", value
