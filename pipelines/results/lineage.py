"""What an artifact was made of: from a report or a model back to the fingerprints of the source files.

In: a store. Out: a `Lineage`, read from manifests alone, and its three spellings: a tree for people, JSON, and DOT.
A report's rows name the artifact that each is from, so that their way back to the files begins there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pipelines.engine.runs import run_status
from pipelines.results.lookup import find_run
from pipelines.spec import RecipeError
from pipelines.store import (
    InputRef,
    Manifest,
    Store,
    StoreDamaged,
    all_manifests,
    input_ref,
    read_manifest,
    successor,
    warn,
)
from vit_model.config import Frozen

SHORT = 12  # characters of a digest that people see


State = Literal["same", "made again", "other content", "gone", "damaged"]
_LOST = ("gone", "damaged")  # its own inputs are unknown


class Edge(Frozen):
    """An input as a stage took it, and what is in its place now.

    `state`: the same; made again with the same content (another manifest, so other bytes or another machine perhaps);
    made again with other content; gone, its manifest was removed; or damaged, its manifest can't be read.
    """

    consumer: str
    field: str
    input: str
    content_digest: str
    state: State


class Lineage(Frozen):
    """`roots` are the keys that were asked for; `nodes` all artifacts behind them that are there, by key."""

    roots: tuple[str, ...]
    nodes: dict[str, Manifest]
    edges: tuple[Edge, ...]
    replaced: dict[str, str]
    """Key -> the key that `--force` put in its place."""


def trace(store: Store, given: str) -> Lineage:
    """The lineage of the artifacts that a key, its unique beginning, RUN/STAGE or RUN means.

    Raises:
        RecipeError: nothing or several things are meant.
    """
    roots = _meant(store, given)
    nodes: dict[str, Manifest] = {}
    shas: dict[str, str] = {}
    edges: list[Edge] = []
    waiting = list(roots)
    while waiting:
        manifest = waiting.pop()
        if manifest.key in nodes:
            continue
        nodes[manifest.key] = manifest
        for field, references in manifest.inputs.items():
            for reference in references:
                found = nodes.get(reference.key) or _found(store, reference)
                if isinstance(found, Manifest):
                    waiting.append(found)
                    if found.key not in shas:
                        shas[found.key] = input_ref(store, found).manifest_sha256
                edges.append(_edge(manifest.key, field, reference, found, shas.get(reference.key)))
    replaced = {key: new for key, node in nodes.items() if (new := _replaced_by(store, node))}
    return Lineage(
        roots=tuple(manifest.key for manifest in roots), nodes=nodes, edges=tuple(edges), replaced=replaced
    )


def _found(store: Store, reference: InputRef) -> Manifest | Literal["gone", "damaged"]:
    try:
        return read_manifest(store, reference.job, reference.key) or "gone"
    except StoreDamaged as error:
        warn(str(error))
        return "damaged"


def _replaced_by(store: Store, node: Manifest) -> str | None:
    try:
        return successor(store, node.job, node.key)
    except StoreDamaged as error:  # what it was made of is known without
        warn(str(error))
        return None


def _edge(
    consumer: str,
    field: str,
    reference: InputRef,
    found: Manifest | Literal["gone", "damaged"],
    sha: str | None,
) -> Edge:
    state: State = "same"
    if not isinstance(found, Manifest):
        state = found
    elif found.content_digest != reference.content_digest:
        state = "other content"
    elif sha != reference.manifest_sha256:
        state = "made again"
    return Edge(
        consumer=consumer,
        field=field,
        input=reference.key,
        content_digest=reference.content_digest,
        state=state,
    )


def _meant(store: Store, given: str) -> list[Manifest]:
    """The artifacts that a person means; of a RUN those that no other artifact of it takes."""
    known = list(all_manifests(store))
    matches = [manifest for manifest in known if given and manifest.key.startswith(given)]
    if len(matches) > 1:
        names = ", ".join(f"{manifest.key[:SHORT]} ({manifest.stage})" for manifest in matches[-8:])
        raise RecipeError(f"{given!r} begins several keys: {names}")
    if matches:
        return matches
    begin, _, stage = given.partition("/")
    try:
        run = find_run(store, begin)
    except RecipeError as error:
        raise RecipeError(f"no artifact has a key that begins with {given!r}, and {error}") from None
    stages = {entry["stage"]: entry.get("key") for entry in run_status(store, run)["stages"]}
    if stage and stage not in stages:
        raise RecipeError(f"{run} has no stage {stage!r}; there are: {', '.join(stages)}")
    keys = {stages[stage]} if stage else set(stages.values())
    made = [manifest for manifest in known if manifest.key in keys]
    taken = {reference.key for manifest in made for found in manifest.inputs.values() for reference in found}
    final = [manifest for manifest in made if manifest.key not in taken]
    if not final:
        raise RecipeError(f"{given}: nothing is committed of it yet")
    return final


# ------------------------------------------------------------------------------------------------- spellings


def as_json(lineage: Lineage) -> dict[str, Any]:
    """Nodes and edges, for machines; files are left out, they stand in the manifests."""
    nodes = [
        {
            "key": key,
            **node.model_dump(mode="json", include=_SAID),
            "replaced_by": lineage.replaced.get(key),
        }
        for key, node in lineage.nodes.items()
    ]
    edges = [edge.model_dump(mode="json") for edge in lineage.edges]
    return {"roots": list(lineage.roots), "nodes": nodes, "edges": edges}


_SAID = {
    "job", "kind", "stage", "run", "attempt", "content_digest", "source", "config", "metrics", "code",
    "timing_dependent", "started", "finished", "user",
}  # fmt: skip
_NOTES = {
    "same": "",
    "made again": "  (made again since, with the same content)",
    "other content": "  (made again since, with OTHER content)",
    "gone": "  (gone: its manifest was removed)",
    "damaged": "  (its manifest is damaged)",
}


def as_text(lineage: Lineage) -> Iterator[str]:
    """A tree for people, from each root to the sources; what was shown before is not shown again."""
    shown: set[str] = set()
    for root in lineage.roots:
        yield from _tree(lineage, root, "", "", shown)


def _tree(lineage: Lineage, key: str, label: str, indent: str, shown: set[str]) -> Iterator[str]:
    """The lines of one artifact and of all behind it; `label` stands before its name, `indent` before the others."""
    node = lineage.nodes[key]
    name = f"{label}{shown_as(node.stage)}  {node.job} {key[:SHORT]}"
    if key in shown:
        yield f"{name}  (above)"
        return
    shown.add(key)
    yield name
    edges = [edge for edge in lineage.edges if edge.consumer == key]
    bar = f"{indent}{'│ ' if edges else '  '}"
    yield f"{bar}  content {node.content_digest[:SHORT]}, {_made(node)}"
    if (new := lineage.replaced.get(key)) is not None:
        yield f"{bar}  replaced since by {new[:SHORT]} (--force)"
    if node.source is not None:
        yield f"{bar}  source {shown_as(describe_source(node))}"
        yield f"{bar}  fingerprint {node.source}"
    for edge in edges:
        last = edge is edges[-1]
        branch = f"{indent}{'└─' if last else '├─'} {edge.field}: "
        below = f"{indent}{'   ' if last else '│  '}"
        if edge.state in _LOST:
            yield f"{branch}{edge.input[:SHORT]}, content {edge.content_digest[:SHORT]}{_NOTES[edge.state]}"
            continue
        head, *rest = _tree(lineage, edge.input, branch, below, shown)
        yield head + _NOTES[edge.state]
        yield from rest


def _made(node: Manifest) -> str:
    """When, by whom, by which code."""
    code = node.code.get("git")
    version = f"code {code[:SHORT]}{' with changes' if node.code.get('dirty') else ''}" if code else "code"
    digest = node.code.get("digest", "")[:SHORT]
    return f"{node.finished[:16].replace('T', ' ')} UTC by {shown_as(node.user)}, {version} ({digest})"


def describe_source(node: Manifest) -> str:
    """A stage's source in words: what it is, and where it was when it was read."""
    source = node.config.get("source") or {"kind": node.job, "root": node.config.get("path")}
    where = source.get("root") or source.get("uri") or source.get("url")
    return f"{source.get('kind', '?')}{f' {where}' if where else ''}"


def shown_as(text: str) -> str:
    """Text from outside on one line, without characters that steer a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


def as_dot(lineage: Lineage) -> Iterator[str]:
    """A directed graph in Graphviz' language, sources to the left: `... --dot | dot -Tsvg > lineage.svg`."""
    yield "digraph lineage {"
    yield '  rankdir="LR";'
    yield '  node [shape="box", fontname="sans-serif"];'
    for key, node in lineage.nodes.items():
        lines = (node.stage, f"{node.job} {key[:SHORT]}", f"content {node.content_digest[:SHORT]}")
        style = ', penwidth="2"' if key in lineage.roots else ""
        yield f"  {_quoted(key)} [label={_quoted(*lines)}{style}];"
        if node.source is not None:
            label = _quoted(describe_source(node), f"files {node.source[:SHORT]}")
            yield f'  {_quoted(f"source {key}")} [label={label}, shape="cylinder"];'
            yield f"  {_quoted(f'source {key}')} -> {_quoted(key)};"
    for lost in {edge.input: edge for edge in lineage.edges if edge.state in _LOST}.values():
        label = _quoted(lost.input[:SHORT], f"content {lost.content_digest[:SHORT]}", lost.state)
        yield f'  {_quoted(lost.input)} [label={label}, style="dashed"];'
    for edge in lineage.edges:
        state = () if edge.state in {"same", *_LOST} else (edge.state,)
        yield f"  {_quoted(edge.input)} -> {_quoted(edge.consumer)} [label={_quoted(edge.field, *state)}];"
    yield "}"


def _quoted(*lines: str) -> str:
    r"""A DOT string of these lines: a backslash would begin one of Graphviz' escapes (\N, \G, \l)."""
    escaped = [shown_as(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    return '"' + "\\n".join(escaped) + '"'
