"""A stage's key: what makes two runs of a stage the same.

key = sha256(canonical JSON {job, the job's VERSION, identity fields, content digests of the inputs})
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from pipelines.spec import AnyStage, Import, Ingest
from pipelines.spec.fields import marks
from vit_model.config import Frozen


def canonical_json(value: Any) -> str:
    """The one spelling of a value in every process.

    Raises:
        TypeError: a value that has no such spelling (a set, NaN, an object); nothing falls back to `str()`.
    """
    _check_canonical(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _check_canonical(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a key of a mapping must be a string, not {key!r}")
            _check_canonical(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_canonical(item)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{value!r} has no canonical spelling")
    elif value is not None and type(value) not in (str, int, bool):
        raise TypeError(f"{value!r} of type {type(value).__name__} has no canonical spelling")


def sha256(text: str) -> str:
    """Hex sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def identity_fields(config: Frozen) -> dict[str, Any]:
    """The fields that change the result: all but execution fields and names of inputs that no result shows.

    A field that came later is left out while it has its default, so that what was made before it came keeps its key.
    """
    fields: dict[str, Any] = {}
    for name, info in type(config).model_fields.items():
        mark = marks(info)
        if mark.get("execution") or ("input" in mark and not mark["shows_names"]):
            continue
        value = getattr(config, name)
        default = info.get_default(call_default_factory=True, validated_data=vars(config))
        if mark.get("later") and value == default:
            continue
        fields[name] = identity_fields(value) if isinstance(value, Frozen) else value
    return fields


def stage_key(
    config: AnyStage, inputs: Mapping[str, Any], source: str | None, code: str | None = None
) -> str:
    """The key of a stage.

    Args:
        config: the stage.
        inputs: field -> content digest of the artifact that it names, or the list of them.
        source: the fingerprint of the files that it reads from outside, None where it reads none.
        code: with `--strict-code` the digest of the stage's code; None leaves it out.
    """
    assert (source is None) == (not isinstance(config, Ingest | Import))
    made_of = {
        "job": config.job,
        "version": config.VERSION,
        "fields": identity_fields(config),
        "inputs": dict(inputs),
        "source": source,
    }
    return sha256(canonical_json(made_of if code is None else made_of | {"code": code}))


def successor_key(key: str, nonce: str) -> str:
    """The key of the artifact that `--force` puts in the place of another."""
    return sha256(canonical_json({"replaces": key, "nonce": nonce}))
