"""The identity of a result: the stage's key, the fingerprint of its source, the digest of its code."""

from pipelines.identity.code import CODE_PACKAGES, PROJECT, code_digest, git_state, import_closure
from pipelines.identity.fingerprint import files_fingerprint, source_fingerprint
from pipelines.identity.key import (
    canonical_json,
    identity_fields,
    recorded_key,
    sha256,
    stage_key,
    successor_key,
)

__all__ = [
    "CODE_PACKAGES",
    "PROJECT",
    "canonical_json",
    "code_digest",
    "files_fingerprint",
    "git_state",
    "identity_fields",
    "import_closure",
    "recorded_key",
    "sha256",
    "source_fingerprint",
    "stage_key",
    "successor_key",
]
