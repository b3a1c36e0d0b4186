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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

from pipelines.spec import RecipeError
from pipelines.store import Manifest, Store, read_manifest
from ray_jobs.data.shards import Dataset, open_artifact
from ray_jobs.evaluation.intervals import paired_difference
from vit_model.contract import ModelContract
from vit_model.preprocessing import normalise

BATCHES, ROUNDS = (1, 32), 7
MOST_IMAGES, SEED = 2_000, 0
_CHUNK = 32  # images in memory at once
_INSTRUCTIONS = {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "amx_int8": "AMX-INT8", "i8mm": "I8MM"}


def quantise(path: Path, output: Path) -> None:
    """Write a model with 8-bit weights in its matrix multiplications, whose inputs are quantised as they come."""
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
            weight_type=QuantType.QInt8,
        )
    finally:
        logging.disable(logging.NOTSET)


def measure(
    store: Store, manifest: Manifest, contract: ModelContract, files: tuple[Path, Path], max_drop: float
) -> dict[str, Any]:
    """Measure the `files` of one model, in float32 and in 8 bits.

    Returns:
        {accuracy, speed, threads, rounds, processor, instructions, bytes, fp32_bytes, onnxruntime}. `accuracy` is None
        if the store has no labelled test images of the model's data set, else {int8, fp32, value, low, high,
        agreement, images, of, seed, data, max_drop}: fractions, and int8 - fp32 with its 95% interval. `speed` has
        {batch, int8, fp32} in images/s.

    Raises:
        RecipeError: it is slower than float32, or less accurate by more than `max_drop` points.
        StoreDamaged: images do not match their manifest.
    """
    name, instructions = _processor()
    threads = len(os.sched_getaffinity(0))
    sessions = [_session(path, threads) for path in files]
    speed = list(_speeds(sessions, contract))
    accuracy = _accuracy(store, manifest, contract, sessions)
    machine = f"{threads} threads of {name} ({', '.join(instructions) or 'neither VNNI nor AMX'})"
    problems = [
        f"slower than float32: {one['int8']:.4g} against {one['fp32']:.4g} images/s at {one['batch']} at a time on"
        f" {machine}"
        for one in speed
        if one["int8"] < one["fp32"]
    ]
    if accuracy is not None:
        accuracy["max_drop"] = max_drop
        drop = -100 * accuracy["value"]
        if drop > max_drop:
            problems.append(
                f"accuracy falls by {drop:.2f} points on {accuracy['images']} test images (95% interval"
                f" {-100 * accuracy['high']:.2f} to {-100 * accuracy['low']:.2f}); --max-drop allows {max_drop:g}"
            )
    if problems:
        raise RecipeError(f"in 8 bits: {'; '.join(problems)}. Nothing was written; export it without --int8")
    return {
        "accuracy": accuracy,
        "speed": speed,
        "threads": threads,
        "rounds": ROUNDS,
        "processor": name,
        "instructions": instructions,
        "fp32_bytes": files[0].stat().st_size,
        "bytes": files[1].stat().st_size,
        "onnxruntime": onnxruntime.__version__,
    }


def in_lines(measured: dict[str, Any]) -> Iterator[str]:
    """Yield what `measure` returns, as lines to print."""
    if (accuracy := measured["accuracy"]) is None:
        yield "accuracy: not measured, because the store has no labelled test images of the model's data"
    else:
        value, low, high = (100 * accuracy[name] for name in ("value", "low", "high"))
        yield (
            f"accuracy: {100 * accuracy['int8']:.1f}% in 8 bits, {100 * accuracy['fp32']:.1f}% in float32, difference"
            f" {value:+.2f} points (95% interval {low:+.2f} to {high:+.2f}), same class on"
            f" {100 * accuracy['agreement']:.1f}% of {accuracy['images']} test images"
        )
    for speed in measured["speed"]:
        yield (
            f"speed, {speed['batch']} at a time: {speed['int8']:.4g} images/s in 8 bits, {speed['fp32']:.4g} in float32"
        )
    instructions = ", ".join(measured["instructions"]) or "neither VNNI nor AMX"
    yield f"on {measured['threads']} threads of {measured['processor']} ({instructions})"


def _session(path: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _speeds(sessions: list[Any], contract: ModelContract) -> Iterator[dict[str, Any]]:
    """Yield {batch, fp32, int8}: images/s, from the median time of alternating rounds after one that is not timed."""
    side, channels = contract.preprocessing.resolution, contract.preprocessing.channels
    for batch in BATCHES:
        images = np.random.default_rng(SEED).standard_normal((batch, channels, side, side), np.float32)
        times: list[list[float]] = [[], []]
        for _ in range(1 + ROUNDS):
            for session, taken in zip(sessions, times, strict=True):
                start = time.perf_counter()
                session.run(None, {"images": images})
                taken.append(time.perf_counter() - start)
        fp32, int8 = (batch / statistics.median(taken[1:]) for taken in times)
        yield {"batch": batch, "fp32": fp32, "int8": int8}


def _accuracy(
    store: Store, manifest: Manifest, contract: ModelContract, sessions: list[Any]
) -> dict[str, Any] | None:
    dataset = _labelled(store, manifest, contract)
    if dataset is None:
        return None
    labels = dataset.labels("test")
    rows = np.arange(len(labels))
    if len(rows) > MOST_IMAGES:
        rows = np.sort(np.random.default_rng(SEED).choice(rows, MOST_IMAGES, replace=False))
    found: list[list[np.ndarray]] = [[], []]
    for start in range(0, len(rows), _CHUNK):
        pixels = dataset.images("test", contract.preprocessing, rows[start : start + _CHUNK])
        images = normalise(torch.from_numpy(pixels), contract.preprocessing, torch.float32).numpy()
        for session, classes in zip(sessions, found, strict=True):
            classes.append(session.run(None, {"images": images})[0].argmax(1))
    fp32, int8 = (np.concatenate(classes) for classes in found)
    right = [(classes == labels[rows])[None] for classes in (int8, fp32)]
    return {
        "int8": float(right[0].mean()),
        "fp32": float(right[1].mean()),
        **paired_difference(*right)._asdict(),
        "agreement": float((fp32 == int8).mean()),
        "images": len(rows),
        "of": len(labels),
        "seed": SEED,
        "data": dataset.info.name,
    }


def _labelled(store: Store, manifest: Manifest, contract: ModelContract) -> Dataset | None:
    """Return the data set that a classifier was trained on, if the store has it with test images of one class each."""
    references = manifest.inputs.get("data", [])
    source = read_manifest(store, references[0].job, references[0].key) if references else None
    if source is None or contract.problem_type != "single_label_classification":
        return None
    dataset = open_artifact(store, source)
    is_usable = dataset.info.class_names == contract.class_names and dataset.info.splits["test"]
    return dataset if is_usable else None


def _processor() -> tuple[str, list[str]]:
    """Return the processor's model name, and which instructions for 8-bit products it has."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return name[1] if name else "an unnamed processor", [
        word for flag, word in _INSTRUCTIONS.items() if flag in present
    ]
