"""Whether a model may be given away: the licence that it gets, and those of the weights that it started from.

Licences have the Hugging Face hub's ids. Data sets have no licence in a store, so whoever publishes a model answers for
the images that it learned from.
"""

from __future__ import annotations

from typing import NamedTuple

from pipelines.results.lineage import Lineage
from pipelines.spec import RecipeError
from pipelines.store import Store, contract_of

# Licences that permit giving away changed weights, under another licence too.
PERMISSIVE = (
    *("apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "isc", "zlib", "unlicense", "pddl"),
    *("cc0-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0"),
)
# Licences that permit it only under the same licence, or not for money, which the same licence tells those who take it.
SAME = (
    *("cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0"),
    *("cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0"),
)
KNOWN = (*PERMISSIVE, *SAME)


class Origin(NamedTuple):
    """Weights that others made and that a model started from: what they are called, and their licence if known."""

    name: str
    license: str | None


def imported(store: Store, lineage: Lineage) -> list[Origin]:
    """Return the imported weights of a lineage, and the inputs that the store has lost, whose licence is unknown."""
    found = []
    for node in lineage.nodes.values():
        if node.job == "import":
            contract, path = contract_of(store, node), str(node.config.get("path"))
            # a local path belongs to whoever imported the weights
            name = path if path.startswith("hf:") else node.stage
            found.append(Origin(name, contract.license if contract else None))
    lost = dict.fromkeys(edge.input[:12] for edge in lineage.edges if edge.state in ("gone", "damaged"))
    return found + [Origin(f"{key} (no longer in the store)", None) for key in lost]


def license_to_publish(stated: str | None, recorded: str | None, origins: list[Origin]) -> str:
    """Return the licence under which a model may be published.

    Args:
        stated: with --license, by the user, who thereby answers for everything whose licence is unknown.
        recorded: the model's own, which it has from the weights that it started from.

    Raises:
        RecipeError: a licence is unknown or forbids it.
    """
    allowed = f"the licences known to permit it are {', '.join(KNOWN)}"
    for name, own in origins:
        if own is None and stated is None:
            raise RecipeError(
                f"the model started from {name}, whose licence is unknown. Find it out, and if it permits giving"
                " changed weights away, state the licence of the model with --license ID"
            )
        if own is not None and own.lower() not in KNOWN:
            raise RecipeError(f"the model started from {name}, whose licence is {own!r}; {allowed}")
    chosen = (stated or recorded or "").lower()
    if not chosen:
        raise RecipeError(
            "the licence of the model is unknown. If you may give it away, its images considered, state its licence"
            " with --license ID, as in --license apache-2.0"
        )
    if origins and chosen not in KNOWN:
        raise RecipeError(f"--license {stated or recorded}: {allowed}")
    for name, own in origins:
        if own is not None and own.lower() in SAME and own.lower() != chosen:
            raise RecipeError(
                f"--license {chosen}: the model started from {name}, whose licence {own} permits giving changed weights"
                " away only under the same licence"
            )
    return chosen
