"""Record that the code of the stages changed: `make accept-code WHY="renamed a variable"`.

`code_versions.json` has, for each job, its VERSION and a digest of the code that it imports. When that code changes, a
test fails until somebody has said which it is: another result (raise VERSION in pipelines/spec/stages/, so that old
artifacts are not taken for new ones) or the same result (give WHY in three words or more; the file keeps the last, and
git those before). Prose, and modules that only moved, do not change the digest.
"""

import ast
import json
import sys
from functools import cache

from pipelines.identity import canonical_json, sha256
from pipelines.identity.code import CODE_PACKAGES, PROJECT, code_form, import_closure
from pipelines.spec import STAGE_TYPES
from tests.support.paths import TESTS

RECORD = TESTS / "code_versions.json"
OURS = (*CODE_PACKAGES, "pipelines")


def digest(job: str) -> str:
    """Return the digest of what the files of a job's code say, whatever their names."""
    return sha256(canonical_json(sorted(filter(None, map(_says, import_closure(job))))))


@cache
def _says(name: str) -> str:
    """Return what a file says without the imports of our own modules, which a move changes."""
    text = (PROJECT / name).read_text()
    if not name.endswith(".py"):
        return sha256(text)
    return code_form(ast.unparse(_WithoutOurImports().visit(ast.parse(text))))


class _WithoutOurImports(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        """Replace an import of our own modules, wherever it is."""
        return ast.Pass() if (node.module or "").split(".")[0] in OURS else node


def main() -> None:
    """Bring the record up to date."""
    why = " ".join(sys.argv[1:]).split()
    if 0 < len(why) < 3:
        sys.exit(f"WHY is {' '.join(why)!r}; say in three words or more why results stay the same")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for job, stage in STAGE_TYPES.items():
        entry, now = record.get(job, {"version": 0}), digest(job)
        if entry["version"] != stage.VERSION:
            record[job] = {"version": stage.VERSION, "digest": now}
        elif entry["digest"] != now:
            if not why:
                sys.exit(f"{job}: its code changed. Raise its VERSION if results change, or say WHY they do not")
            record[job] = entry | {"digest": now, "same_result": " ".join(why)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
