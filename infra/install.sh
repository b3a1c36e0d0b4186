#!/usr/bin/env bash
# Makes .venv and installs vitflow into it, DeepSpeed with its CPU communication op built now, never at run time.
#   DEVICE=cpu|cuda   found out when not given
#   TORCH_INDEX=URL   take torch from this package index; else from pip's own, or PyTorch's where that has only CUDA's
#   PYTHON=python3    the interpreter to make .venv with, 3.11 or newer
#   EXTRAS=dev        what is needed beside the dependencies; nothing when not given
#   INSTALLER=pip     install with pip; else with uv, which is faster, and with pip if uv cannot do it
set -euo pipefail
cd "$(dirname "$0")/.."

die() { printf 'install: %s\n' "$*" >&2; exit 1; }
pinned() { sed -n "s/^$1==//p" constraints.txt; }
installed() { .venv/bin/python -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "$1" 2>/dev/null || true; }

device=${DEVICE:-}
if [ -z "$device" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi
fi
case $device in cpu | cuda) ;; *) die "DEVICE=$device: cpu or cuda" ;; esac

python=${PYTHON:-python3}
command -v "$python" >/dev/null || die "$python is not there: install Python 3.11 or newer, or give PYTHON="
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$("$python" --version) is too old: 3.11 or newer is needed (PYTHON=)"
"$python" -c 'import venv, ensurepip' 2>/dev/null || die "the module venv is missing: apt-get install python3-venv"
if [ "$device" = cpu ]; then
  command -v g++ >/dev/null || die "g++ is missing, DeepSpeed's communication op is built with it: apt-get install g++"
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [ -f "$header" ] || die "$header is missing, DeepSpeed's communication op is built with it: apt-get install python3-dev"
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
export PATH="$PWD/.venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
pip() { .venv/bin/python -m pip --quiet "$@"; }

# uv reads none of pip's settings (an index, a folder of wheels, a certificate), so they are translated. pip prefers the
# newest file of all its indexes, uv by default the first index that has the package.
uv=
if [ "${INSTALLER:-uv}" = uv ] && settings=$(.venv/bin/python -m pip config list | "$python" infra/uv_settings.py) \
  && pip install "uv==0.13.9"; then
  uv=yes
  while IFS= read -r setting; do [ -z "$setting" ] || export "${setting?}"; done <<<"$settings"
  export UV_INDEX_STRATEGY=unsafe-best-match
fi
install() {
  if [ -n "$uv" ]; then
    .venv/bin/uv pip install --quiet --python .venv/bin/python "$@" && return
    echo "install: uv could not install this, so pip does"
    uv=
  fi
  pip install "$@"
}

torch="torch==$(pinned torch)"
cpu_index=https://download.pytorch.org/whl/cpu
index=(); [ -z "${TORCH_INDEX:-}" ] || index=(--index-url "$TORCH_INDEX")
has_torch=$(installed torch)
if [ "$device" = cpu ] && [ "${has_torch%+*}" != "$(pinned torch)" ]; then
  # PyPI's torch for Linux on x86 is the CUDA build: several gigabytes that a machine without a GPU can't use
  report=$(pip install --dry-run --no-deps --ignore-installed --report - "${index[@]}" "$torch")
  read -r file version < <("$python" -c 'import json, sys
package = json.load(sys.stdin)["install"][0]
print(package["download_info"]["url"], package["metadata"]["version"])' <<<"$report")
  torch="torch==$version"  # names the CPU build, where its version says so
  if [[ $(uname -sm) == "Linux x86_64" && $file != *cpu* ]]; then
    [ -z "${TORCH_INDEX:-}" ] || die "$TORCH_INDEX has only the CUDA build of torch, and this machine has no GPU: DEVICE=cuda takes it"
    echo "install: no GPU here, so torch's CPU build is taken from $cpu_index (the CUDA build: DEVICE=cuda)"
    index=(--index-url "$cpu_index") torch="torch==$(pinned torch)"
  fi
fi

echo "install: torch ($device)"
install "${index[@]}" "$torch"

# DeepSpeed is built while the rest is installed. What its build imports is there before: half a package would fail it.
install -c constraints.txt setuptools wheel ninja packaging numpy
built=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$built"' EXIT
has_op() { [ "$device" = cuda ] || .venv/bin/python -c 'import deepspeed.ops.comm.deepspeed_shm_comm_op' &>/dev/null; }
build=
if [ "$(installed deepspeed)" != "$(pinned deepspeed)" ] || ! has_op; then
  echo "install: DeepSpeed, with its communication op built, and everything else (a minute or two)"
  ops=0; [ "$device" = cuda ] || ops=1
  # no cache: a wheel that was built for another torch, or without the op, has the same name. With ninja the op's two
  # files compile at the same time, to the same instructions.
  DS_BUILD_SHM_COMM=$ops DS_ENABLE_NINJA=1 pip wheel --no-cache-dir --no-deps --no-build-isolation -c constraints.txt -w "$built" deepspeed &
  build=$!
fi

# From here on uv compiles to bytecode, as pip does, torch included: whoever runs vitflow may not be able to write here.
export UV_COMPILE_BYTECODE=1
extras=${EXTRAS:-}
mapfile -t others < <("$python" -c 'import sys, tomllib
from pathlib import Path
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print(*(name for name in project["dependencies"] if not name.startswith("deepspeed")), sep="\n")')
install -c constraints.txt "${others[@]}"

if [ -n "$build" ]; then
  wait "$build" || die "DeepSpeed was not built: see what pip says above"
  install --no-deps --force-reinstall "$built"/deepspeed-*.whl
fi
install --no-build-isolation -c constraints.txt -e ".${extras:+[$extras]}"
if [ "$extras" = dev ]; then
  # Tests compare ViTs with timm's, which need all that timm depends on but torchvision: it must match torch to the
  # digit, and pip would take torch anew from PyPI for it.
  install --no-deps -c constraints.txt timm
fi
has_op || die "DeepSpeed's communication op was not built: rm -rf .venv and look at what pip says with PIP_QUIET=0"
