"""The lineage of an artifact: from a report or a model back to the fingerprints of the source files.

In: a store. Out: a `Lineage`, read only from manifests, as a text tree or JSON. Each row of a report names its
artifact, so the lineage of that artifact is the lineage of the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, Literal

from pipelines.results.lookup import find_manifests
from pipelines.spec import LAST, RecipeError, recorded_checkpoint
from pipelines.store import (
    InputRef,
    Manifest,
    Store,
    StoreDamaged,
    read_with_reference,
    successor,
    warn,
)
from vit_model.fields import Frozen

SHORT = 12  # characters of a digest in text


State = Literal["same", "made again", "other content", "gone", "damaged"]
Found = tuple[Manifest, InputRef] | Literal["gone", "damaged"]
_LOST = ("gone", "damaged")  # the inputs of such an artifact are unknown


class Edge(Frozen):
    """An input as a stage used it, and its state in the store now.

    `state`: the same; rebuilt with the same content (another manifest, so perhaps other bytes or another machine);
    rebuilt with other content; gone, if its manifest was removed; or damaged, if its manifest cannot be read.
    `checkpoint`: a pretraining's checkpoint that the stage used, best or step:N; None for the last and other inputs.
    """

    consumer: str
    field: str
    input: str
    content_digest: str
    checkpoint: str | None
    state: State


class Lineage(Frozen):
    """The requested artifacts (`roots`, keys) and all existing artifacts that they were made from (`nodes`, by key)."""

    roots: tuple[str, ...]
    nodes: dict[str, Manifest]
    edges: tuple[Edge, ...]
    replaced: dict[str, str]
    """Key -> the key of its replacement by `--force`."""


def trace(store: Store, selector: str) -> Lineage:
    """Return the lineage of the artifacts that a key, a unique key prefix, RUN/STAGE, RUN or @ALIAS matches.

    Raises:
        RecipeError: nothing matches, or the prefix is ambiguous.
    """
    roots = _roots(store, selector)
    nodes: dict[str, Manifest] = {}
    edges: list[Edge] = []
    read_once = cache(partial(_read_input, store))
    pending = list(roots)
    while pending:
        manifest = pending.pop()
        if manifest.key in nodes:
            continue
        nodes[manifest.key] = manifest
        for field, references in manifest.inputs.items():
            for used in references:
                found = read_once(used.job, used.key)
                if not isinstance(found, str):
                    pending.append(found[0])
                edges.append(_edge(manifest, field, used, found))
    replaced = {key: new for key, node in nodes.items() if (new := _replaced_by(store, node))}
    return Lineage(roots=tuple(manifest.key for manifest in roots), nodes=nodes, edges=tuple(edges), replaced=replaced)


def _read_input(store: Store, job: str, key: str) -> Found:
    """Return an input as it is now."""
    try:
        return read_with_reference(store, job, key) or "gone"
    except StoreDamaged as error:
        warn(str(error))
        return "damaged"


def _replaced_by(store: Store, node: Manifest) -> str | None:
    try:
        return successor(store, node.job, node.key)
    except StoreDamaged as error:  # the lineage does not need it
        warn(str(error))
        return None


def _edge(consumer: Manifest, field: str, used: InputRef, found: Found) -> Edge:
    state: State = "same"
    if isinstance(found, str):
        state = found
    elif found[1].content_digest != used.content_digest:
        state = "other content"
    elif found[1].manifest_sha256 != used.manifest_sha256:
        state = "made again"
    checkpoint = recorded_checkpoint(consumer.config, field)
    return Edge(
        consumer=consumer.key,
        field=field,
        input=used.key,
        content_digest=used.content_digest,
        checkpoint=None if checkpoint == LAST else checkpoint,
        state=state,
    )


def _roots(store: Store, selector: str) -> list[Manifest]:
    """Return the artifacts that a selector matches, without inputs of others among them."""
    matches = find_manifests(store, selector)
    taken = {
        reference.key for manifest in matches for references in manifest.inputs.values() for reference in references
    }
    roots = [manifest for manifest in matches if manifest.key not in taken]
    if not roots:
        raise RecipeError(f"{selector}: no committed results yet")
    return roots


# ------------------------------------------------------------------------------------------------- formats


def as_json(lineage: Lineage) -> dict[str, Any]:
    """Return nodes and edges as JSON, without the artifacts' files, which their manifests list."""
    nodes = [
        node.model_dump(mode="json", exclude=_NOT_IN_JSON) | {"replaced_by": lineage.replaced.get(key)}
        for key, node in lineage.nodes.items()
    ]
    edges = [edge.model_dump(mode="json") for edge in lineage.edges]
    return {"roots": list(lineage.roots), "nodes": nodes, "edges": edges}


_NOT_IN_JSON = {"layout_version", "nonce", "files", "inputs", "environment", "own_sha256"}
_NOTES = {
    "same": "",
    "made again": "  (rebuilt since, with the same content)",
    "other content": "  (rebuilt since, with OTHER content)",
    "gone": "  (gone: its manifest was removed)",
    "damaged": "  (its manifest is damaged)",
}


def as_text(lineage: Lineage) -> Iterator[str]:
    """Yield the lines of a tree from each root to the sources; an artifact is shown in full only once."""
    shown: set[str] = set()
    for root in lineage.roots:
        yield from _tree(lineage, root, "", "", shown)


def _tree(lineage: Lineage, key: str, label: str, indent: str, shown: set[str]) -> Iterator[str]:
    """Yield the lines of one artifact and its inputs; `label` precedes its name, `indent` the other lines."""
    node = lineage.nodes[key]
    name = f"{label}{printable(node.stage)}  {node.job} {key[:SHORT]}"
    if key in shown:
        yield f"{name}  (above)"
        return
    shown.add(key)
    yield name
    edges = [edge for edge in lineage.edges if edge.consumer == key]
    bar = f"{indent}{'│ ' if edges else '  '}"
    yield f"{bar}  content {node.content_digest[:SHORT]}, {_origin(node)}"
    if (new := lineage.replaced.get(key)) is not None:
        yield f"{bar}  replaced since by {new[:SHORT]} (--force)"
    if node.source is not None:
        yield f"{bar}  source {printable(describe_source(node))}"
        yield f"{bar}  fingerprint {node.source}"
    for edge in edges:
        last = edge is edges[-1]
        named = "" if edge.checkpoint is None else f" ({edge.checkpoint})"
        branch = f"{indent}{'└─' if last else '├─'} {edge.field}{named}: "
        below = f"{indent}{'   ' if last else '│  '}"
        if edge.state in _LOST:
            yield f"{branch}{edge.input[:SHORT]}, content {edge.content_digest[:SHORT]}{_NOTES[edge.state]}"
            continue
        head, *rest = _tree(lineage, edge.input, branch, below, shown)
        yield head + _NOTES[edge.state]
        yield from rest


def _origin(node: Manifest) -> str:
    """Describe when an artifact was made, by whom and by which code."""
    code = node.code.get("git")
    version = f"code {code[:SHORT]}{' with changes' if node.code.get('dirty') else ''}" if code else "code"
    digest = node.code.get("digest", "")[:SHORT]
    return f"{node.finished[:16].replace('T', ' ')} UTC by {printable(node.user)}, {version} ({digest})"


def describe_source(node: Manifest) -> str:
    """Describe a stage's source: its kind, and its location when it was read."""
    source = node.config.get("source") or {"kind": node.job, "root": node.config.get("path")}
    location = source.get("root") or source.get("uri") or source.get("url")
    return f"{source.get('kind', '?')}{f' {location}' if location else ''}"


def printable(text: str) -> str:
    """Return untrusted text on one line, with control characters escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
