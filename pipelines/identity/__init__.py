"""The identity of a result: the stage's key, the fingerprint of its source, the digest of its code."""

from pipelines.identity.code import CODE_SCHEME as CODE_SCHEME
from pipelines.identity.code import PROJECT as PROJECT
from pipelines.identity.code import code_digest as code_digest
from pipelines.identity.code import code_form as code_form
from pipelines.identity.code import git_state as git_state
from pipelines.identity.code import import_closure as import_closure
from pipelines.identity.fingerprint import files_fingerprint as files_fingerprint
from pipelines.identity.fingerprint import listed_source as listed_source
from pipelines.identity.fingerprint import source_fingerprint as source_fingerprint
from pipelines.identity.key import canonical_json as canonical_json
from pipelines.identity.key import identity_fields as identity_fields
from pipelines.identity.key import recorded_key as recorded_key
from pipelines.identity.key import sha256 as sha256
from pipelines.identity.key import stage_key as stage_key
from pipelines.identity.key import successor_key as successor_key
