"""Record that the code of the stages changed: `make accept-code WHY="renamed a variable"`.

`code_versions.json` has, for each job, its VERSION and the digest of the code that it imports. When that code changes,
a test fails until somebody has said which it is: another result (raise VERSION in pipelines/spec/stages/, so that old
artifacts are not taken for new ones) or the same result (give WHY in three words or more; the file keeps the last, and
git those before).
"""

import json
import sys

from pipelines.identity import code_digest
from pipelines.spec import STAGE_TYPES
from tests.support.paths import TESTS

RECORD = TESTS / "code_versions.json"


def main() -> None:
    """Bring the record up to date."""
    why = " ".join(sys.argv[1:]).split()
    if 0 < len(why) < 3:
        sys.exit(f"WHY is {' '.join(why)!r}; say in three words or more why results stay the same")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for job, stage in STAGE_TYPES.items():
        entry = record.get(job, {"version": 0})
        digest = code_digest(job)
        if entry["version"] != stage.VERSION:
            record[job] = {"version": stage.VERSION, "digest": digest}
        elif entry["digest"] != digest:
            if not why:
                sys.exit(
                    f"{job}: its code changed. Raise its VERSION if results change, or say WHY they do not"
                )
            record[job] = entry | {"digest": digest, "same_result": " ".join(why)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
