#!/usr/bin/env bash
# Makes .venv and installs vitflow into it, DeepSpeed with its CPU communication op built now, never at run time.
#   DEVICE=cpu|cuda   found out when not given
#   TORCH_INDEX=URL   take torch from this package index; else from pip's own, or PyTorch's where that has only CUDA's
#   PYTHON=python3    the interpreter to make .venv with, 3.11 or newer
#   EXTRAS=dev        what is needed beside the dependencies; nothing when empty, as in an image
set -euo pipefail
cd "$(dirname "$0")/.."

die() { printf 'install: %s\n' "$*" >&2; exit 1; }
pinned() { sed -n "s/^$1==//p" constraints.txt; }

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

torch="torch==$(pinned torch)"
cpu_index=https://download.pytorch.org/whl/cpu
index=(); [ -z "${TORCH_INDEX:-}" ] || index=(--index-url "$TORCH_INDEX")
if [ "$device" = cpu ] && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  # PyPI's torch for Linux on x86 is the CUDA build: several gigabytes that a machine without a GPU can't use
  file=$(pip install --dry-run --no-deps --ignore-installed --report - "${index[@]}" "$torch" \
    | "$python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["download_info"]["url"])')
  if [[ $(uname -sm) == "Linux x86_64" && $file != *cpu* ]]; then
    [ -z "${TORCH_INDEX:-}" ] || die "$TORCH_INDEX has only the CUDA build of torch, and this machine has no GPU: DEVICE=cuda takes it"
    echo "install: no GPU here, so torch's CPU build is taken from $cpu_index (the CUDA build: DEVICE=cuda)"
    index=(--index-url "$cpu_index")
  fi
fi

echo "install: torch ($device)"
pip install "${index[@]}" "$torch"
pip install -c constraints.txt setuptools wheel ninja packaging  # what DeepSpeed's build needs
echo "install: DeepSpeed, with its communication op built (a minute or two)"
ops=0; [ "$device" = cuda ] || ops=1
DS_BUILD_SHM_COMM=$ops pip install --no-build-isolation -c constraints.txt deepspeed
echo "install: everything else"
extras=${EXTRAS-dev}
pip install --no-build-isolation -c constraints.txt -e ".${extras:+[$extras]}"
if [ "$extras" = dev ]; then
  # Tests compare ViTs with timm's, which need all that timm depends on but torchvision: it must match torch to the
  # digit, and pip would take torch anew from PyPI for it.
  pip install --no-deps -c constraints.txt timm
fi
if [ "$device" = cpu ]; then
  .venv/bin/python -W ignore -c 'import deepspeed.ops.comm.deepspeed_shm_comm_op' 2>/dev/null \
    || die "DeepSpeed's communication op was not built: rm -rf .venv and look at what pip says with PIP_QUIET=0"
fi
