# Every target does everything it needs, from nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
PROTOC := .venv-protos
# half of a test is waiting for processes: three keep two cores busy
TESTERS ?= 3
# Checks of names, words and sizes: tools/guards.
GUARDS := class_names function_length import_circles page_width person_words unit_suffixes

# Hundreds of programs are started in a run of the tests: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test retest explore fuzz chaos postgresql criu adapters check guards docs bench programs gpu install-check anchors protos wire clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

setup: $(STAMP) ## virtual environment with everything, in .venv

$(STAMP): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (torch, gRPC, ...: two to four minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Ganger needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[server]' --group dev --group examples
	@test "$$(id -u)" != 0 || tools/fetch_criu.sh $(VENV)/criu $(BIN)/criu || echo "without CRIU there are no images of processes; make criu tries again" >&2
	@touch $@

demo: $(STAMP) ## real jobs: placed as gangs, paused, moved, re-pinned; the proof is printed and in build/demo.json
	@$(BIN)/ganger demo --report build/demo.json

# build/tested: the run came to its end, so that what failed in it is known (pytest: 0 all passed, 1 some failed).
test: $(STAMP) ## every test but the long ones (at most 15 minutes on 2 cores; TESTERS=1: one after the other)
	@rm -f build/tested
	@$(BIN)/python -m pytest -q -m "not chaos" --numprocesses $(TESTERS) --dist worksteal; code=$$?; [ $$code -gt 1 ] || touch build/tested; exit $$code

retest: $(STAMP) ## only the tests that failed the last time
	@test -e build/tested || { echo "no run of the tests came to its end: make test" >&2; exit 1; }
	@$(BIN)/python -m pytest -q -m "not chaos" --last-failed --last-failed-no-failures none; code=$$?; [ $$code -eq 5 ] || exit $$code

explore: $(STAMP) ## the property tests with new random examples (five minutes)
	@$(BIN)/python -m pytest -q -m "hypothesis and not chaos" --hypothesis-profile explore

fuzz: $(STAMP) ## a million inputs for all decoders of what users, jobs, nodes and files send (ten minutes)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --group fuzz
	@PYTHONPATH=tests $(BIN)/python -m fuzzing

chaos: $(STAMP) ## the whole matrix of kills, storms and slow stories (an hour and a half)
	@$(BIN)/python -m pytest -q -m chaos --timeout 1800 --hypothesis-profile explore

postgresql: $(STAMP) ## the store and fail-over on a PostgreSQL server (Debian's package: apt-get install postgresql)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[postgresql]'
	@tests/store/on_postgresql.sh $(BIN)/python
	@$(BIN)/python -m pytest -q tests/system/test_fail_over.py

criu: $(STAMP) ## CRIU for images of processes, from Debian's archive, in .venv (the system stays as it is)
	@tools/fetch_criu.sh $(VENV)/criu $(BIN)/criu

adapters: $(STAMP) ## transformers, accelerate, lightning and tensorboard, in .venv, so that what needs them is tested
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --group adapters

check: $(STAMP) ## lint, types, layers, and guards of names, words and sizes
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MAKE) --silent guards

guards: $(STAMP) ## names, words and sizes alone, a few seconds
	@for guard in $(GUARDS); do PYTHONPATH=tools $(BIN)/python -m guards.$$guard || exit 1; done

$(VENV)/.docs: $(STAMP)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	@touch $@

docs: $(VENV)/.docs ## the documentation as a site in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP) ## every benchmark but anchors and chaos, one JSON object each, samples in build/bench
	@for name in $$($(BIN)/ganger bench --list | grep -vxE 'anchors|chaos'); do $(BIN)/ganger bench $$name --json || exit 1; done

PROGRAMS_ENV := build/programs/env
SOURCES      ?=
programs: $(STAMP) ## public programs, unmodified, stopped and moved: docs/measurements/programs (SOURCES=DIR: checkouts)
	@$(BIN)/python -m benchmarks.programs.environment $(PROGRAMS_ENV)
	@$(BIN)/python -m benchmarks.programs --python $(PROGRAMS_ENV)/bin/python $(if $(SOURCES),--sources $(SOURCES))

# With the PyTorch that $(PYTHON) has, whatever version, else with one from the package index, or from WHEELS, as what else
# is missing.
# A directory on the path lets $(VENV)-gpu see the packages of an interpreter that is in an environment of its own.
GPU_VENV := .venv-gpu
WHEELS   ?=
QUICK    ?=
gpu: ## what Ganger does on this machine's GPU, as docs/measurements/gpu-NAME (eight minutes; WHEELS=DIR: offline)
	@test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv --without-pip $(GPU_VENV)
	@$(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(GPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth
	@$(GPU_VENV)/bin/python -c 'import torch' 2>/dev/null || $(if $(WHEELS),PIP_NO_INDEX=1 PIP_FIND_LINKS=$(abspath $(WHEELS))) $(PYTHON) -m pip --python $(GPU_VENV)/bin/python install --quiet torch
	@$(GPU_VENV)/bin/python -c 'import torch; assert torch.cuda.is_available()' || { echo "PyTorch of $(PYTHON) sees no GPU. Try: make gpu PYTHON=..." >&2; exit 1; }
	@$(if $(WHEELS),PIP_NO_INDEX=1 PIP_FIND_LINKS=$(abspath $(WHEELS))) $(PYTHON) -m pip --python $(GPU_VENV)/bin/python install --quiet --editable '.[server]'
	@$(GPU_VENV)/bin/python -c 'import cuda.bindings.driver' 2>/dev/null || $(if $(WHEELS),PIP_NO_INDEX=1 PIP_FIND_LINKS=$(abspath $(WHEELS))) $(PYTHON) -m pip --python $(GPU_VENV)/bin/python install --quiet --editable '.[gpu]' || echo "without cuda-bindings: nothing of the driver's checkpoint calls" >&2
	@tools/fetch_criu.sh $(GPU_VENV)/criu $(GPU_VENV)/bin/criu || echo "without CRIU: no images of processes" >&2
	@$(GPU_VENV)/bin/python -m benchmarks.gpu_page $(if $(QUICK),--quick)

install-check: $(STAMP) ## as root: install, remove and upgrade on two machines made with systemd-nspawn (six minutes, the first time 15)
	@$(BIN)/python -m benchmarks.installation

anchors: $(STAMP) ## ganger against the papers' policies on real traces (hours; goes on where it was stopped)
	@$(BIN)/ganger bench anchors --json

# Generated with the oldest tools whose code the declared floors can load: newer code on an older runtime fails at import.
protos: ## generate the wire code from protos/ into client/ganger
	@test -x $(PROTOC)/bin/python || { $(PYTHON) -m venv $(PROTOC) && $(PROTOC)/bin/pip install --quiet grpcio-tools==1.76.0 'mypy-protobuf==4.0.0' 'setuptools<81'; }
	@export PATH=$(PROTOC)/bin:$$PATH; protoc="python -m grpc_tools.protoc -I protos"; \
		$$protoc --python_out=client --mypy_out=quiet:client $$(find protos -name '*.proto' | sort) && \
		$$protoc --grpc_python_out=client --mypy_grpc_out=quiet:client $$(grep -lr '^service ' protos | sort) && \
		sed -i '/^ # This class is part of an EXPERIMENTAL API\.$$/,$$d' client/ganger/v1/*_pb2_grpc.py client/ganger/agent/v1/*_pb2_grpc.py

wire: $(STAMP) ## record the messages of this version of the wire; a change that breaks a version is refused
	@PYTHONPATH=tools $(BIN)/python -m guards.wire_listing --record

clean: ## remove what was built
	@rm -rf $(VENV) $(PROTOC) build dist
