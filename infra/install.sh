#!/usr/bin/env bash
# Create .venv and install vitflow into it. DeepSpeed's CPU communication op is built now, never at run time.
#   DEVICE=cpu|cuda   default: cuda if nvidia-smi finds a GPU
#   TORCH_INDEX=URL   package index for torch; default: pip's own, or PyTorch's if that has only the CUDA build
#   PYTHON=python3    the interpreter to create .venv with, 3.11 or newer
#   EXTRAS=hub,onnx   optional dependencies to install; dev: all, and the tools for tests; default: none
#   DEEPSPEED=no      do not build and install DeepSpeed, which linters do not need
#   INSTALLER=pip     install with pip; default: uv, which is faster, or pip if uv cannot do it
set -euo pipefail
cd "$(dirname "$0")/.."

die() { printf 'install: %s\n' "$*" >&2; exit 1; }
pinned() { sed -n "s/^$1==//p" constraints.txt; }
installed() { .venv/bin/python -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "$1" 2>/dev/null || true; }

device=${DEVICE:-}
if [ -z "$device" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi
fi
case $device in cpu | cuda) ;; *) die "DEVICE=$device: expected cpu or cuda" ;; esac

python=${PYTHON:-python3}
command -v "$python" >/dev/null || die "$python: command not found. Install Python 3.11 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$("$python" --version) is too old. Set PYTHON to Python 3.11 or newer"
"$python" -c 'import venv, ensurepip' 2>/dev/null || die "the module venv is missing: apt-get install python3-venv"
with_deepspeed=yes; [ "${DEEPSPEED:-yes}" = yes ] || with_deepspeed=
if [ "$device" = cpu ] && [ -n "$with_deepspeed" ]; then
  command -v g++ >/dev/null || die "g++ is missing; it builds DeepSpeed's communication op: apt-get install g++"
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [ -f "$header" ] || die "$header is missing; it is needed to build DeepSpeed's communication op: apt-get install python3-dev"
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
export PATH="$PWD/.venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
pip() { .venv/bin/python -m pip --quiet "$@"; }

# uv reads none of pip's settings (an index, a folder of wheels, a certificate), so translate them. pip takes the best match
# of all its indexes; by default uv takes the first index that has the package.
uv=
if [ "${INSTALLER:-uv}" = uv ] && settings=$(.venv/bin/python -m pip config list | "$python" infra/uv_settings.py) \
  && pip install "uv==0.13.9"; then
  uv=yes
  while IFS= read -r setting; do [ -z "$setting" ] || export "${setting?}"; done <<<"$settings"
  export UV_INDEX_STRATEGY=unsafe-best-match
fi
# With uv, -c replaces this variable; pip adds the two.
constraints=(); for file in ${UV_CONSTRAINT:-}; do constraints+=(-c "$file"); done
install() {
  if [ -n "$uv" ]; then
    .venv/bin/uv pip install --quiet --python .venv/bin/python "${constraints[@]}" "$@" && return
    echo "install: uv failed, so pip installs from here on"
    uv=
  fi
  pip install "$@"
}

torch="torch==$(pinned torch)"
cpu_index=https://download.pytorch.org/whl/cpu
index=(); [ -z "${TORCH_INDEX:-}" ] || index=(--index-url "$TORCH_INDEX")
has_torch=$(installed torch)
if [ "$device" = cpu ] && [ "${has_torch%+*}" != "$(pinned torch)" ]; then
  # PyPI's torch for Linux on x86 is the CUDA build: several gigabytes that a machine without a GPU cannot use.
  report=$(pip install --dry-run --no-deps --ignore-installed --report - "${index[@]}" "$torch")
  read -r file version < <("$python" -c 'import json, sys
package = json.load(sys.stdin)["install"][0]
print(package["download_info"]["url"], package["metadata"]["version"])' <<<"$report")
  torch="torch==$version"  # with +cpu, if the index says so
  if [[ $(uname -sm) == "Linux x86_64" && $file != *cpu* ]]; then
    [ -z "${TORCH_INDEX:-}" ] || die "$TORCH_INDEX has only the CUDA build of torch, and this machine has no GPU. Set DEVICE=cuda to install it anyway"
    echo "install: no GPU found, so torch's CPU build comes from $cpu_index (DEVICE=cuda installs the CUDA build)"
    index=(--index-url "$cpu_index") torch="torch==$(pinned torch)"
  fi
fi

echo "install: torch ($device)"
install "${index[@]}" "$torch"

# DeepSpeed is built while the rest is installed. What its build imports is installed first, because a package that is only
# half there would break the build.
install -c constraints.txt setuptools wheel ninja packaging numpy
built=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$built"' EXIT
has_op() { [ "$device" = cuda ] || .venv/bin/python -c 'import deepspeed.ops.comm.deepspeed_shm_comm_op' &>/dev/null; }
build=
if [ -n "$with_deepspeed" ] && { [ "$(installed deepspeed)" != "$(pinned deepspeed)" ] || ! has_op; }; then
  echo "install: DeepSpeed, with its communication op built, and everything else (a minute or two)"
  ops=0; [ "$device" = cuda ] || ops=1
  # No cache: a wheel that was built for another torch, or without the op, has the same name. Ninja compiles the op's two
  # files at the same time, to the same instructions.
  DS_BUILD_SHM_COMM=$ops DS_ENABLE_NINJA=1 pip wheel --no-cache-dir --no-deps --no-build-isolation -c constraints.txt -w "$built" deepspeed &
  build=$!
fi

# From here on uv compiles everything to bytecode, as pip does, because the user who runs vitflow may not have write access.
export UV_COMPILE_BYTECODE=1
# Everything that vitflow requires but DeepSpeed. An extra may name others: vitflow[hub,onnx].
extras=${EXTRAS:-}
mapfile -t others < <("$python" -c 'import re, sys, tomllib
from pathlib import Path
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
def flat(names):
    for name in names:
        if match := re.fullmatch(r"vitflow\[(.*)\]", name):
            for extra in match[1].split(","):
                yield from flat(project["optional-dependencies"][extra])
        elif not name.startswith("deepspeed"):
            yield name
print(*flat(project["dependencies"] + [f"vitflow[{extra}]" for extra in sys.argv[1:]]), sep="\n")' ${extras:+"$extras"})
install -c constraints.txt "${others[@]}"

if [ -n "$build" ]; then
  wait "$build" || die "DeepSpeed was not built; see pip's output above"
  install --no-deps --force-reinstall "$built"/deepspeed-*.whl
fi
no_deps=(); [ -n "$with_deepspeed" ] || no_deps=(--no-deps)
install "${no_deps[@]}" --no-build-isolation -c constraints.txt -e .
if [ "$extras" = dev ]; then
  # Tests compare ViTs with timm's, which need timm's dependencies except torchvision. torchvision must match torch exactly,
  # and pip would reinstall torch from PyPI for it.
  install --no-deps -c constraints.txt timm
fi
[ -z "$with_deepspeed" ] || has_op || die "DeepSpeed's communication op was not built. Remove .venv and install again with PIP_QUIET=0 to see why"
