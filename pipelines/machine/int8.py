"""An ONNX model with 8-bit weights, measured beside the same model in float32 before anybody gets it.

8 bits are not always faster (onnxruntime#26143) nor always as accurate, so both are measured on this machine:
accuracy on test images of the model's data set, if the store has them, the same images for both; and speed, in rounds
that alternate between the two.
"""

from __future__ import annotations

import logging
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import QuantType, quantize_dynamic

from pipelines.spec import RecipeError
from pipelines.store import Manifest, Store, read_manifest
from ray_jobs.data.shards import open_artifact
from ray_jobs.evaluation.intervals import paired_difference
from vit_model.contract import ModelContract
from vit_model.preprocessing import normalise

BATCHES, ROUNDS = (1, 32), 7
MOST_IMAGES, SEED = 2_000, 0
_CHUNK = 32  # images in memory at once
_INSTRUCTIONS = {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "amx_int8": "AMX-INT8", "i8mm": "I8MM"}


def quantise(path: Path, output: Path) -> None:
    """Write a model with 8-bit weights in its matrix multiplications, whose inputs are quantised as they come.

    Weights use 7 of the 8 bits: without VNNI, a processor adds two products of 8 bits in 16 bits, which overflows, so
    a model that was right on the machine that exported it would be wrong on an older one.
    """
    exported = onnx.load(path)
    # quantize_dynamic transposes a Gemm's weight, and then finds that the exporter noted another shape for it
    del exported.graph.value_info[:]
    logging.disable(logging.WARNING)  # it recommends preprocessing that vitflow's graphs do not need
    try:
        quantize_dynamic(
            exported,
            output,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        logging.disable(logging.NOTSET)


def measure(
    store: Store, manifest: Manifest, contract: ModelContract, files: tuple[Path, Path], max_drop: float
) -> list[str]:
    """Measure the `files` of one model, in float32 and in 8 bits; return the results as lines.

    Raises:
        RecipeError: it is slower than float32, or less accurate by more than `max_drop` points.
        StoreDamaged: images do not match their manifest.
    """
    threads = len(os.sched_getaffinity(0))
    machine = f"{threads} threads of {_processor()}"
    sessions = [_session(path, threads) for path in files]
    lines, problems = [], []
    for batch in BATCHES:
        fp32, int8 = _speeds(sessions, contract, batch)
        speed = f"{int8:.4g} images/s in 8 bits, {fp32:.4g} in float32, {batch} at a time"
        lines.append(f"speed: {speed} ({int8 / fp32:.2f} times as fast)")
        problems += [f"slower than float32: {speed}, on {machine}"] * (int8 < fp32)
    megabytes = [path.stat().st_size / 1e6 for path in files]
    lines.append(f"medians of {ROUNDS} alternating rounds on {machine}; other processors have other speeds")
    lines.append(f"size: {megabytes[1]:.2f} MB in 8 bits, {megabytes[0]:.2f} MB in float32")
    if (found := _classes(store, manifest, contract, sessions)) is None:
        lines.append(
            "accuracy: not measured; that takes a classifier with one label per image and its test images in the store"
        )
    else:
        images, labels, theirs, ours = found  # the classes in float32, and in 8 bits
        right = (ours == labels)[None], (theirs == labels)[None]
        value, low, high = (100 * number for number in paired_difference(*right))
        change = f"{value:+.2f} points on {images} (95% interval {low:+.2f} to {high:+.2f}, paired)"
        lines.append(
            f"accuracy: {100 * right[0].mean():.1f}% in 8 bits, {100 * right[1].mean():.1f}% in float32: {change}; the"
            f" same class for {100 * (ours == theirs).mean():.1f}% of them; a fall of {max_drop:g} points was allowed"
        )
        problems += [f"accuracy changes by {change}; --max-drop allows {max_drop:g}"] * (-value > max_drop)
    if problems:
        raise RecipeError(f"in 8 bits: {'; '.join(problems)}. Nothing was written; export it without --int8")
    return lines


def _session(path: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _speeds(sessions: list[Any], contract: ModelContract, batch: int) -> list[float]:
    """Return images/s of each session, from the median time of alternating rounds after one that is not timed."""
    side, channels = contract.preprocessing.resolution, contract.preprocessing.channels
    images = np.random.default_rng(SEED).standard_normal((batch, channels, side, side), np.float32)
    times: list[list[float]] = [[] for _ in sessions]
    for _ in range(1 + ROUNDS):
        for session, taken in zip(sessions, times, strict=True):
            start = time.perf_counter()
            session.run(None, {"images": images})
            taken.append(time.perf_counter() - start)
    return [batch / statistics.median(taken[1:]) for taken in times]


def _classes(
    store: Store, manifest: Manifest, contract: ModelContract, sessions: list[Any]
) -> tuple[str, NDArray[Any], NDArray[Any], NDArray[Any]] | None:
    """Return a name of the test images, their labels, and the classes that each session finds, all [n].

    None if the store does not have the data set of a classifier with test images of one class each.
    """
    references = manifest.inputs.get("data", [])
    source = read_manifest(store, references[0].job, references[0].key) if references else None
    if source is None or contract.problem_type != "single_label_classification":
        return None
    dataset = open_artifact(store, source)
    labels = dataset.labels("test")
    if dataset.info.class_names != contract.class_names or not len(labels):
        return None
    rows = np.sort(np.random.default_rng(SEED).permutation(len(labels))[:MOST_IMAGES])
    found: list[list[NDArray[Any]]] = [[], []]
    for start in range(0, len(rows), _CHUNK):
        pixels = dataset.images("test", contract.preprocessing, rows[start : start + _CHUNK])
        images = normalise(torch.from_numpy(pixels), contract.preprocessing, torch.float32).numpy()
        for session, classes in zip(sessions, found, strict=True):
            classes.append(session.run(None, {"images": images})[0].argmax(1))
    drawn = f", drawn with seed {SEED}" if len(rows) < len(labels) else ""
    name = f"{len(rows)} of {len(labels)} test images of {dataset.info.name}{drawn}"
    return name, labels[rows], np.concatenate(found[0]), np.concatenate(found[1])


def _processor() -> str:
    """Return the processor's model name, and which instructions for 8-bit products it has."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    present = [word for flag, word in _INSTRUCTIONS.items() if re.search(rf"\b{flag}\b", text)]
    return f"{name[1] if name else 'an unnamed processor'} ({', '.join(present) or 'neither VNNI nor AMX'})"
