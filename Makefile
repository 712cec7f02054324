# Everything a person or CI does here. Only make and Python 3.11 or newer are needed.

PYTHON ?= python3
PORT ?= 3000
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PROTO_BIN := .venv-proto/bin
PIP := -m pip --disable-pip-version-check --quiet --quiet
MINILM := .models/all-MiniLM-L6-v2

.DEFAULT_GOAL := help
.PHONY: help run test lint format proto proto-check docs docs-check docker docker-steps build go-client chaos soak bench bench-peers licenses fuzz

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.made ## serve all-MiniLM-L6-v2 on port 3000 (PORT=..., ARGS="--max-batch-tokens 4096")
	@$(BIN)/python scripts/fetch_demo_model.py minilm
	@exec $(BIN)/tei-grpc --model-id $(MINILM) --port $(PORT) $(ARGS)

test: $(VENV)/.made ## all tests; one file: make test ARGS=tests/unit/test_cli.py
	@$(BIN)/python scripts/fetch_demo_model.py minilm splade xlm-r-tokenizer
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.made proto-check ## style, types, import rules, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml tei_grpc scripts clients/python/tei_client
	$(BIN)/python scripts/generate_options.py --check
	$(BIN)/python scripts/generate_models_doc.py --check
	$(BIN)/hadolint Dockerfile-grpc
	$(BIN)/python scripts/generate_licenses.py --check

format: $(VENV)/.made ## rewrite the code in the project's style, and the options table
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/generate_options.py

proto: .venv-proto/.made ## generate the stubs from proto/tei.proto
	$(PROTO_BIN)/python scripts/generate_stubs.py

proto-check: .venv-proto/.made ## fail when the stubs are stale
	$(PROTO_BIN)/python scripts/generate_stubs.py --check

docs: $(VENV)/.made ## measure every model again and write docs/models.md
	@$(BIN)/python scripts/fetch_demo_model.py minilm splade
	$(BIN)/python scripts/generate_models_doc.py

docs-check: $(VENV)/.made ## fail when the list of models in the docs is stale
	$(BIN)/python scripts/generate_models_doc.py --check

licenses: $(VENV)/.made ## write docs/licenses.md from what is installed
	$(BIN)/python scripts/generate_licenses.py

fuzz: $(VENV)/.made ## bytes that nobody meant to send, over RPCs and checkpoints (ARGS="--runs 100000")
	$(BIN)/python tests/fuzz/run.py calls $(ARGS)
	$(BIN)/python tests/fuzz/run.py checkpoints $(ARGS)

chaos: $(VENV)/.made ## 10,000 malformed, impatient and hostile calls, every fault, and overload, against servers of our own
	@$(BIN)/python scripts/fetch_demo_model.py minilm
	$(BIN)/python tests/chaos/abuse.py --calls 10000
	$(BIN)/python tests/chaos/faults.py
	$(BIN)/python tests/chaos/overload.py

soak: $(VENV)/.made ## servers at saturation for 10 minutes: memory, descriptors, latency, counters (ARGS="--minutes 60")
	$(BIN)/python tests/chaos/soak.py $(ARGS)

bench: $(VENV)/.made ## all benchmarks in a short form (see benchmarks/README.md)
	@$(BIN)/python scripts/fetch_demo_model.py minilm
	$(BIN)/python -m benchmarks --short $(ARGS)

bench-peers: .venv-peers/.made ## what `benchmarks.compare` compares with, in an environment of its own

.venv-peers/.made: Makefile
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python $(PIP) install onnx==1.23.2 onnxruntime==1.32.0 onnxscript==0.7.2 openvino==2026.4.1 \
		sentence-transformers==6.2.0 torch==2.13.0 transformers==5.24.0
	@touch $@

docker: ## the image, for CPUs (Dockerfile-grpc says how to build the one with CUDA)
	docker build -f Dockerfile-grpc -t tei-grpc:cpu .

docker-steps: $(VENV)/.made ## the steps of Dockerfile-grpc without Docker, with torch from where pip finds it
	@$(BIN)/python scripts/fetch_demo_model.py minilm
	TORCH_INDEX= $(BIN)/python scripts/run_dockerfile_steps.py

build: $(VENV)/.made ## wheel and sdist in dist/
	$(BIN)/python -m build
	$(BIN)/python -m build --outdir dist clients/python

go-client: ## the Go example in dist/, with Debian's Go packages (see clients/go/README.md)
	scripts/build_go_client.sh build dist/tei-example

# A stamp newer than pyproject.toml says that the environment holds what it names.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.made: pyproject.toml | $(VENV)/bin/python
	@echo "Installing tei-grpc and its tools (torch is large: the first time takes minutes)"
	@$(BIN)/python $(PIP) install -e '.[dev]'
	@touch $@

# Generated code needs a protobuf at least as new as its generator: an old generator, in an environment of its own.
.venv-proto/.made: Makefile
	@echo "Making .venv-proto"
	@$(PYTHON) -m venv .venv-proto
	@$(PROTO_BIN)/python $(PIP) install grpcio-tools==1.76.0 setuptools==80.9.0
	@touch $@
