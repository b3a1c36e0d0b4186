"""The identity of a result: the stage's key, the fingerprint of its source, the digest of its code."""

from pipelines.identity.code import (
    CODE_PACKAGES,
    CODE_SCHEME,
    PROJECT,
    code_digest,
    code_form,
    git_state,
    import_closure,
)
from pipelines.identity.fingerprint import files_fingerprint, listed_source, source_fingerprint
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
    "CODE_SCHEME",
    "PROJECT",
    "canonical_json",
    "code_digest",
    "code_form",
    "files_fingerprint",
    "git_state",
    "identity_fields",
    "import_closure",
    "listed_source",
    "recorded_key",
    "sha256",
    "source_fingerprint",
    "stage_key",
    "successor_key",
]
