#!/usr/bin/env bash
# Write infra/lock/: what the image installs, each package with the sha256 of its one file. Versions are those of constraints.txt.
# Run it with Python 3.11 on Linux on x86-64, as in the image, after a change of constraints.txt or of dependencies.
#   WHEELS=FOLDER   has torch's CPU build, if its index cannot be reached
set -euo pipefail
cd "$(dirname "$0")/.."
cpu_index=https://download.pytorch.org/whl/cpu
torch=$(sed -n 's/^torch==/torch==/p' constraints.txt)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# PyPI alone decides, whatever pip's settings say: --isolated ignores the environment and the user's file, PIP_CONFIG_FILE all.
resolve() { PIP_CONFIG_FILE=/dev/null python3 -m pip --isolated install --quiet --dry-run --ignore-installed -c constraints.txt --report "$@"; }
mapfile -t dependencies < <(python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")')
resolve "$scratch/cuda.json" "${dependencies[@]}" setuptools wheel
resolve "$scratch/cpu.json" --no-deps --index-url "$cpu_index" ${WHEELS:+--no-index --find-links="$WHEELS"} "$torch+cpu"

python3 - "$scratch" "$cpu_index" <<'END'
import json, re, sys
from pathlib import Path

def lines(report):
    """Return {package: its line} of a report of pip."""
    found = {}
    for item in json.loads(Path(sys.argv[1], report).read_text())["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        found[name] = f"{name}=={item['metadata']['version']} --hash=sha256:{digest}"
    return found

packages, cpu = lines("cuda.json"), lines("cpu.json")
cuda = [name for name in packages if re.match(r"torch$|triton$|nvidia-|cuda-", name)]
files = {
    "cuda.txt": [packages.pop(name) for name in sorted(cuda)],
    "deepspeed.txt": [packages.pop("deepspeed")],
    "packages.txt": [packages[name] for name in sorted(packages)],
    "cpu.txt": [f"--extra-index-url {sys.argv[2]}", *cpu.values()],
}
for name, content in files.items():
    Path("infra/lock", name).write_text("\n".join(content) + "\n")
END
