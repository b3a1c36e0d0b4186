# make quickstart   install what it and the README's commands need, run the whole pipeline on real images
# make test         install, run the tests that a change needs (make test-all: all of them)
# make check        lint, types, import directions, limits of size; installs all but DeepSpeed, whose build takes minutes
# make install      also the extras and the tools for tests; DEVICE=cpu|cuda (found out when not given);
#                   TORCH_INDEX=URL takes torch from another index; INSTALLER=pip installs without uv
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
BIN := .venv/bin
# Compiled files are kept even where the environment says otherwise: every process of a run would compile the tests anew.
PARALLEL := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto --dist worksteal --ignore=tests/end_to_end
# Tests with Ray wait for processes to start half of the time, so two files run side by side, each with a Ray of its own.
WITH_RAY := $(BIN)/pytest -n 2 --dist loadfile --durations=20
export PYTHON DEVICE TORCH_INDEX INSTALLER WHY

.PHONY: quickstart test test-all test-fast test-faults test-schedule test-hosts test-cluster check format accept-code install lock benchmarks speedrun clean

quickstart: .venv/installed
	$(BIN)/vitflow run quickstart

test: install  # what needs no Ray on all cores, then the rest: each of them starts many processes
	$(PARALLEL) -m "not ray and not full"
	$(WITH_RAY) -m "ray and not full"

test-all: install
	$(PARALLEL) -m "not ray"
	$(WITH_RAY) -m ray

test-fast: install
	$(PARALLEL) -m "not ray and not slow"

test-faults: install  # the long form of the random kills
	VITFLOW_FAULT_ROUNDS=$${VITFLOW_FAULT_ROUNDS:-20} $(BIN)/pytest tests/end_to_end/test_faults.py

test-schedule: install  # retraining every minute by two servers that are killed, over a folder that is never at rest, for ten minutes
	VITFLOW_SCHEDULE_MINUTES=$${VITFLOW_SCHEDULE_MINUTES:-10} $(BIN)/pytest -s tests/end_to_end/test_promotion.py -k servers

test-hosts: install  # several hosts in network namespaces, as root: no name resolves, links break, one is killed; wrong clocks
	VITFLOW_HOSTS=1 $(BIN)/pytest tests/end_to_end/test_hosts.py tests/end_to_end/test_clocks.py

test-cluster: install  # a Ray with a token, the store on S3 (moto, and Ceph where it is installed), the quickstart
	VITFLOW_CLUSTER_PIPELINE=quickstart $(BIN)/pytest tests/end_to_end/test_clusters.py -k submitted

check: .venv/installed-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 0 tests/test_limits.py

format: .venv/installed-check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: .venv/installed-dev

lock: .venv/installed  # the image's packages with their hashes; with Python 3.11 on Linux on x86-64, after a change of constraints.txt
	PATH="$$PWD/$(BIN):$$PATH" bash infra/lock.sh

.venv/installed: pyproject.toml constraints.txt infra/install.sh infra/uv_settings.py
	EXTRAS=hub,onnx bash infra/install.sh
	touch $@

.venv/installed-dev: .venv/installed
	EXTRAS=dev bash infra/install.sh
	touch $@ .venv/installed-check

.venv/installed-check: pyproject.toml constraints.txt infra/install.sh infra/uv_settings.py
	EXTRAS=dev DEEPSPEED=no bash infra/install.sh
	touch $@

accept-code: install  # after a change of a stage's code that leaves its results as they are: WHY="..."
	$(BIN)/python -m tests.scripts.accept_code "$${WHY:-}"

benchmarks: install  # on an otherwise idle machine; each prints its table and keeps it in benchmarks/results/
	$(BIN)/python benchmarks/ingest.py
	$(BIN)/python benchmarks/near_copies.py
	$(BIN)/python benchmarks/pipeline_overhead.py
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/report_query.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/mae.py
	$(BIN)/python benchmarks/pretrain.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/resume.py
	$(BIN)/python benchmarks/zero_matrix.py
	$(BIN)/python benchmarks/fewshot.py
	$(BIN)/python benchmarks/embed.py
	$(BIN)/python benchmarks/sweep.py
	$(BIN)/python benchmarks/label_audit.py

speedrun: install  # the two-core record on Fashion-MNIST (apt-get install dataset-fashion-mnist): two hours, idle machine
	$(BIN)/python benchmarks/speedrun/run.py resnet.py
	$(BIN)/python benchmarks/speedrun/run.py vit.py

clean:
	rm -rf .venv build *.egg-info
