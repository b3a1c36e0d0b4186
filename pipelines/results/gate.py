"""May B replace A? An exit status for a pipeline of checks, and a table in Markdown for a pull request.

In: two compared results (`pipelines.results.compare`). The rule is the promotion's: the lower end of the paired 95%
interval of B - A must be above -max_loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from pipelines.results.accuracies import labels_of
from pipelines.results.compare import Compared, Pair, as_json, measured_line, of_sides, percent_interval
from pipelines.results.lookup import find_manifests
from pipelines.spec import RecipeError
from pipelines.store import Store, read_manifest
from ray_jobs.data.shards import open_artifact
from ray_jobs.evaluation.intervals import rules_out
from ray_jobs.evaluation.rows import ACCURACY, is_reference
from ray_jobs.reporting.measures import Entry

_VERDICTS = {True: "passed", False: "worse", None: "not shown"}
MOST_IMAGES, MOST_CLASSES = 20, 10  # in the table for a pull request


class Gate(NamedTuple):
    """Whether B may replace A, and why."""

    is_open: bool
    lines: list[str]


def gate(compared: Compared, max_loss: float) -> Gate:
    """Apply the rule to every pair of different results.

    Raises:
        RecipeError: there is no pair, or one was not scored on the same images with the same draws of labels.
    """
    judged: list[bool] = []
    lines = []
    for _, line in _different(compared):
        difference = line["difference"]
        if not difference["paired"]:
            raise RecipeError(
                f"--gate: {line['task']}: A and B were not scored on the same test images with the same annotations, or"
                " have other draws of labels, so that their difference is not paired"
            )
        ruled_out = rules_out(difference["low"], difference["high"], max_loss)
        judged.append(ruled_out is True)
        lines.append(
            f"{line['task']}, {labels_of(line['b'])}: {_VERDICTS[ruled_out]}:"
            f" {_points(difference['value'])} points (95% CI {_points(difference['low'])} to"
            f" {_points(difference['high'])}) on {line['b']['num_images']:,} images, allowed: {0 - 100 * max_loss:g}"
        )
    if not judged:
        why = "".join(f"; {reason}" for reason in compared.reasons)
        raise RecipeError(f"--gate: A and B have no different measurements to compare{why}")
    return Gate(all(judged), lines)


def _different(compared: Compared) -> list[tuple[Pair, dict[str, Any]]]:
    """Return the pairs of two models and their lines: without references, and without what both results share."""
    return [
        (pair, line)
        for pair, line in zip(compared.pairs, as_json(compared)["both"], strict=True)
        if pair.a.artifact != pair.b.artifact and not (is_reference(pair.a.method) and is_reference(pair.b.method))
    ]


def markdown(store: Store, compared: Compared) -> Iterator[str]:
    """Yield the lines of a table in Markdown, and for accuracies the images that flipped and the classes that lost."""
    yield f"| {compared.metric}, % (95% interval) | A | B | B − A | images |"
    yield "|---|---:|---:|---:|---:|"
    different = _different(compared)
    for _, line in different:
        sides = [percent_interval(line[side], compared.metric, "", "–") for side in ("a", "b")]
        of = line["difference"]
        difference = f"{_points(of['value'])} ({_points(of['low'])} to {_points(of['high'])})"
        unpaired = "" if of["paired"] else ", not paired"
        name = f"{line['task']}, {of_sides(line, itemgetter('method'))}, {of_sides(line, labels_of)}{unpaired}"
        images = f"{line['b']['num_images']:,}"
        part = f" in common of {line['of_images']:,}" if line["b"]["num_images"] < line["of_images"] else ""
        yield f"| {_cell(name)} | {sides[0]} | {sides[1]} | {difference} | {images}{part} |"
    yield ""
    yield f"A: `{compared.a}`, B: `{compared.b}`"
    for pair, _ in different if compared.metric == ACCURACY else ():
        if isinstance(pair.b, Entry) and isinstance(pair.a, Entry) and pair.a.sample_ids == pair.b.sample_ids:
            yield from _flips(store, pair)


def _flips(store: Store, pair: Pair) -> Iterator[str]:
    """Yield what changed between two entries of the same images, in the first draw of each."""
    a, b = pair.a, pair.b
    assert isinstance(a, Entry) and isinstance(b, Entry)
    right_a, right_b, predicted = a.correct[0], b.correct[0], b.predictions[0]
    sides = {side: measured_line(entry, ACCURACY) for side, entry in (("a", a), ("b", b))}
    about = f"{b.task}, {of_sides(sides, itemgetter('method'))}, {of_sides(sides, labels_of)}"
    about = _cell(about + ", first draw" * (max(len(a.draws), len(b.draws)) > 1))
    dataset = _dataset(store, b)
    for title, flipped in (("only A has right", right_a & ~right_b), ("only B has right", ~right_a & right_b)):
        places = np.flatnonzero(flipped)
        yield ""
        yield f"**{about}: {len(places):,} images that {title}**" + ("" if len(places) else ".")
        if len(places):
            yield ""
            yield "| image | label | B's prediction |"
            yield "|---|---|---|"
        for place in places[:MOST_IMAGES]:
            identity = b.sample_ids[place]
            labels = dataset.label(b.labels[place]), dataset.label(predicted[place])
            cells = dataset.files.get(identity, identity), *labels
            yield f"| {' | '.join(map(_cell, cells))} |"
        if (more := len(places) - MOST_IMAGES) > 0:
            yield f"| {more:,} more | | |"
    losses = {
        label: float(right_b[of].mean() - right_a[of].mean())
        for label in np.unique(b.labels)
        if len(of := np.flatnonzero(b.labels == label))
    }
    worse = sorted((loss, label) for label, loss in losses.items() if loss < 0)
    yield ""
    yield f"**{about}: {len(worse):,} of {len(losses):,} classes got worse**" + (":" if worse else ".")
    yield ", ".join(f"{_cell(dataset.label(label))} {_points(loss)}" for loss, label in worse[:MOST_CLASSES])


class _Dataset(NamedTuple):
    """The names of labels, and the files of test images by id; empty if the dataset is gone."""

    label_names: tuple[str, ...] = ()
    files: Mapping[str, str] = MappingProxyType({})

    def label(self, label: int) -> str:
        return self.label_names[label] if 0 <= label < len(self.label_names) else str(label)


def _dataset(store: Store, entry: Entry) -> _Dataset:
    """Return the dataset that an entry was scored on."""
    (made,) = find_manifests(store, entry.artifact)
    for reference in made.inputs.get("data", ()):
        if (manifest := read_manifest(store, reference.job, reference.key)) is not None:
            dataset = open_artifact(store, manifest)
            index = dataset.index("test").select(["sample_id", "key"]).to_pydict()
            return _Dataset(dataset.info.label_names, dict(zip(index["sample_id"], index["key"], strict=True)))
    return _Dataset()


def _points(difference: float) -> str:
    return f"{100 * difference:+.2f}"


def _cell(text: str) -> str:
    """Return untrusted text as a cell of a table in Markdown."""
    return re.sub(r"([\\`*_|<>\[\]@#])", r"\\\1", " ".join(text.split()))
