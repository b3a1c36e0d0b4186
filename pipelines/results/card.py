"""The model card of an exported model: a README.md with the Hugging Face hub's header, from what the store knows of it.

In: a store, a model's manifest, and how it is exported. Out: Markdown. The accuracies are those that reports show. Text
from outside (names of classes, data sets and files) is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipelines.results.compare import measurements
from pipelines.results.licences import KNOWN, Origin, imported
from pipelines.results.lineage import printable, trace
from pipelines.results.lookup import jobs_of
from pipelines.spec import recorded_checkpoint
from pipelines.store import Manifest, Store, all_manifests, local_file
from ray_jobs.data.shards import DatasetInfo
from ray_jobs.evaluation.rows import is_apart, is_reference
from ray_jobs.reporting.lines import published_beside
from ray_jobs.reporting.provenance import published_protocol
from ray_jobs.reporting.verdicts import labels_text
from vit_model.contract import ModelContract

Format = Literal["hf", "timm", "npz", "onnx"]

TEMPLATE = Path(__file__).with_suffix(".md.j2")
LIBRARIES = {"hf": "transformers", "timm": "timm", "onnx": "onnx"}
MOST_CLASSES = 200  # that the card lists


class Data(NamedTuple):
    """A data set that a model was trained on."""

    info: DatasetInfo
    source: str


class Facts(NamedTuple):
    """What the store knows of a model, apart from its contract."""

    manifest: Manifest
    checkpoint: str
    data: list[Data]
    """What it and the models before it were trained on."""
    origins: list[Origin]
    """The imported weights that it started from."""
    measured: list[dict[str, Any]]
    """{task, protocol, method, labels, metric, value, draws, images, chosen_on}, and low and high if there is an
    interval, and published if its protocol is a published accuracy's."""


def facts_of(store: Store, manifest: Manifest, checkpoint: str) -> Facts:
    """Collect what the store knows of a model.

    Raises:
        StoreDamaged: a file does not match its manifest.
    """
    lineage = trace(store, manifest.key)
    trained_on = {edge.input for edge in lineage.edges if edge.field == "data"}
    data = [
        # without the location, which belongs to whoever trained the model
        Data(DatasetInfo.model_validate_json(path.read_bytes()), str(node.config["source"]["kind"]))
        for node in lineage.nodes.values()
        if node.key in trained_on and (path := local_file(store, node, "dataset.json")) is not None
    ]
    return Facts(manifest, checkpoint, data, imported(store, lineage), _measured(store, manifest, checkpoint))


def _measured(store: Store, manifest: Manifest, checkpoint: str) -> list[dict[str, Any]]:
    """Return the numbers on test of a model and of the evaluations of its features."""
    evaluations = [
        other
        for other in all_manifests(store, *jobs_of("evaluation"))
        if any(
            (reference.key, reference.content_digest) == (manifest.key, manifest.content_digest)
            for reference in other.inputs.get("backbone", ())
        )
        and recorded_checkpoint(other.config, "backbone") == checkpoint
    ]
    measured = measurements(store, [manifest, *evaluations])
    repeated = {manifest.key: published_protocol(store, manifest)}
    names = ("task", "protocol", "method", "stage")
    lines = [
        {name: getattr(entry, name) for name in names}
        | {"labels": entry.labels_per_class, "metric": "accuracy", **entry.accuracy._asdict()}
        | {"draws": len(entry.draws), "images": len(entry.sample_ids)}
        | {"chosen_on": ", ".join(entry.selected_on)}
        | published_beside(entry, repeated.get(entry.artifact))
        for entry in measured.entries
    ] + [
        {name: line[name] for name in (*names, "metric", "value", "draws")}
        | {"labels": line["labels_per_class"], "images": line["num_images"]}
        | {"chosen_on": ", ".join(line["selected_on"])}
        | ({} if line["low"] is None else {"low": line["low"], "high": line["high"]})
        for line in measured.others
    ]
    return [line for line in lines if not is_reference(line["method"])]


def render(
    facts: Facts,
    contract: ModelContract,
    to: Format,
    place: str,
    lost: list[str],
    int8: list[str] | None = None,
    detected: Sequence[str] = (),
) -> str:
    """Return the card.

    Args:
        detected: the classes of a detector, whose backbone has `contract`.
        place: the folder or the hub's ORG/NAME that the card's code loads the model from.
        lost: a line for each property that the format does not keep.
        int8: the results of `pipelines.machine.int8`, if the weights have 8 bits.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=False,  # noqa: S701 - Markdown, escaped with `text`
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"text": text, "percent": percent, "python": repr}
    header = _header(facts, contract, to, _task(contract, is_detector=bool(detected)))
    return environment.get_template(TEMPLATE.name).render(
        header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True, width=1000),
        facts=facts,
        contract=contract,
        pixels=contract.preprocessing,
        is_vit=contract.architecture.family == "vit",
        several=contract.is_multi_label and bool(contract.class_names),
        thresholds=dict(zip(contract.class_names, contract.thresholds or repeat(0.5), strict=False)),
        format=to,
        place=place,
        lost=lost,
        int8=int8,
        detected=detected,
        most_classes=MOST_CLASSES,
    )


def _task(contract: ModelContract, is_detector: bool) -> str:
    """Return the hub's name of what the model does."""
    if is_detector:
        return "object-detection"
    if contract.mask_classes:
        return "image-segmentation"
    return "image-classification" if contract.class_names else "image-feature-extraction"


def _header(facts: Facts, contract: ModelContract, to: Format, task: str) -> dict[str, Any]:
    """Return the fields that the hub reads."""
    license_ = printable(contract.license or "")
    is_known = license_.lower() in ("", *KNOWN)
    names = dict.fromkeys(data.info.name for data in facts.data)
    results = _results(facts, "image-classification" if task == "image-feature-extraction" else task)
    fields = {
        "license": license_.lower() if is_known else "other",
        "license_name": None if is_known else license_,
        "library_name": LIBRARIES.get(to),
        "pipeline_tag": task,
        "tags": ["vitflow", "vision-transformer" if contract.architecture.family == "vit" else "resnet"],
        "datasets": [name for name in names if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)],
        "model-index": results and [{"name": printable(facts.manifest.stage), "results": results}],
    }
    return {name: value for name, value in fields.items() if value}


def _results(facts: Facts, task: str) -> list[dict[str, Any]]:
    """Return the numbers as the hub's model-index, without those about a part of test."""
    results = []
    for line in (line for line in facts.measured if not is_apart(line["method"])):
        labels = labels_text(line["labels"], None)
        dataset = dict.fromkeys(("name", "type"), printable(line["task"])) | {"split": "test"}
        name = f"{line['metric']}, {line['protocol']}, {labels}"
        metric = {"type": line["metric"], "name": name, "value": round(line["value"], 5)}
        results.append({"task": {"type": task}, "dataset": dataset, "metrics": [metric]})
    return results


def text(value: object) -> str:
    """Return untrusted text on one line of Markdown, without markup."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", printable(str(value)))


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"
