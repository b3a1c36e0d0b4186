"""A stage's key: two runs of a stage with the same key have the same result.

key = sha256(canonical JSON {job, the stage's version, identity fields, content digests of the inputs})

and, if the stage names a checkpoint of an input other than the last, that name.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from pipelines.spec import AnyStage, Import, Ingest
from vit_model.fields import Frozen, marks


def canonical_json(value: Any) -> str:
    """Return the JSON of a value, which is the same in every process.

    Raises:
        TypeError: the value has no such form (a set, NaN, an object); nothing falls back to `str()`.
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
            raise TypeError(f"{value!r} has no canonical JSON form")
    elif value is not None and type(value) not in (str, int, bool):
        raise TypeError(f"{value!r} of type {type(value).__name__} has no canonical JSON form")


def sha256(text: str) -> str:
    """Return the sha256 of a text in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def identity_fields(config: Frozen) -> dict[str, Any]:
    """Return the fields that change the result: all except execution fields and names of inputs that it does not show.

    A field marked `later` is left out while it has its default, so that results from before it was added keep their
    keys.
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
        fields[name] = _identity(value)
    return fields


def _identity(value: Any) -> Any:
    if isinstance(value, Frozen):
        return identity_fields(value)
    if isinstance(value, dict):
        return {name: _identity(each) for name, each in value.items()}
    return value


def stage_key(config: AnyStage, inputs: Mapping[str, Any], source: str | None, code: str | None = None) -> str:
    """Return the key of a stage.

    Args:
        config: the stage.
        inputs: field -> content digest of the artifact that it names, or the list of them.
        source: the fingerprint of the files that it reads from outside the store; None if it reads none.
        code: with `--strict-code`, the digest of the stage's code; None leaves it out.
    """
    assert (source is None) == (not isinstance(config, Ingest | Import))
    return _key(config, config.version, identity_fields(config), inputs, source, code)


def recorded_key(
    config: AnyStage,
    record: Mapping[str, Any],
    version: Any,
    inputs: Mapping[str, Any],
    source: str | None,
    code: str | None = None,
) -> str:
    """Return the key that a stage had when it was recorded.

    Args:
        config: the recorded configuration.
        record: its JSON as recorded. Fields that did not exist yet were not in the key.
        version: the stage's version at that time.
        inputs, source, code: as `stage_key` takes them.

    Raises:
        TypeError: a recorded value cannot be part of a key.
    """
    return _key(config, version, _in_both(identity_fields(config), record), inputs, source, code)


def _in_both(fields: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are also in a record, at any depth."""
    return {
        name: _in_both(value, record[name])
        if isinstance(value, Mapping) and isinstance(record[name], Mapping)
        else value
        for name, value in fields.items()
        if name in record
    }


def _key(
    config: AnyStage,
    version: Any,
    fields: Mapping[str, Any],
    inputs: Mapping[str, Any],
    source: str | None,
    code: str | None,
) -> str:
    parts = {
        "job": config.job,
        "version": version,
        "fields": dict(fields),
        "inputs": dict(inputs),
        "source": source,
    }
    if checkpoints := config.checkpoints():
        parts["checkpoints"] = checkpoints
    return sha256(canonical_json(parts if code is None else parts | {"code": code}))


def successor_key(key: str, nonce: str) -> str:
    """Return the key of the artifact that replaces another by `--force`."""
    return sha256(canonical_json({"replaces": key, "nonce": nonce}))
