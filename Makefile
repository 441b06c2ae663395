# Every target makes what it needs first (scripts/setup) and is quick when that is there already.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo check static test versions soak mutants sim bench lock docs pictures site format dist sbom audit clean

BIN := .venv/bin
CODE := src tests $(wildcard scripts/*.py) docs/conf.py $(if $(wildcard benchmarks/*.py),benchmarks)
# Compiling the tests takes longer than importing them, so bytecode is kept, also where Python is told not to.
BYTECODE := unset PYTHONDONTWRITEBYTECODE
EXAMPLES := $(wildcard examples/*/)

help: ## what can be done here
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with everything the other targets need
	@scripts/setup

demo: setup ## a cluster on this machine, in about a minute (ARGS=--stay leaves it running)
	@$(BIN)/umbel demo $(ARGS)

check: setup ## static: format, lint, types, who may import whom, dead links
	@$(MAKE) --no-print-directory static

static:
	@$(BIN)/ruff format --check --quiet --output-format concise $(CODE) examples || { echo "run: make format" >&2; exit 1; }
	@$(BIN)/ruff check --quiet $(CODE) examples
	@$(BIN)/mypy $(CODE)
	@for example in $(EXAMPLES); do MYPYPATH="$$example" $(BIN)/mypy --no-error-summary "$$example"; done
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m scripts.links

# Tests wait more than they work, so three processes share their files. Servers that take long to start serve all three.
# What else they need is installed while the checks run. In a new checkout, one process compiles the tests for all.
test: setup ## check, then every test, with the scenarios at reduced counts
	@scripts/setup tests & trap wait EXIT; $(MAKE) --no-print-directory static; wait $$!
	@$(BYTECODE); [ -e tests/__pycache__ ] || $(BIN)/pytest --collect-only -qq $(ARGS) >/dev/null || true
	@$(BYTECODE); $(BIN)/pytest --numprocesses 3 --dist loadfile --durations 10 $(ARGS)

versions: setup ## the tests on every Python that is found, 3.11 to 3.14 (ARGS=tests/brokers for some)
	@scripts/setup tests
	@scripts/versions $(ARGS)

soak: check ## the same scenarios at full counts, and a few mutants of each module
	@scripts/setup tests
	@$(BYTECODE); UMBEL_SOAK=1 $(BIN)/pytest $(ARGS)
	@$(BYTECODE); $(BIN)/python -m tests.mutants --per-module 5

mutants: setup ## do a module's tests notice when it is wrong? (ARGS="--module lease --all")
	@scripts/setup servers
	@$(BYTECODE); $(BIN)/python -m tests.mutants $(ARGS)

sim: setup ## the full set of simulations: 200,000 elections under faults, mutants, every course of one (ARGS=mutants)
	@$(BIN)/python -m tests.sim.full $(ARGS)

# Peers run in .venv-bench, so that their dependencies never mix with ours.
bench: ## every benchmark, beside its peers (ARGS=--json for machines)
	@scripts/setup bench
	@scripts/setup servers
	@for benchmark in benchmarks/[a-z]*.py; do echo "$$benchmark" >&2; $(BIN)/python "$$benchmark" $(ARGS); done

docs: setup ## write the pages that are made from the code: API, settings, every command
	@$(BIN)/python -m scripts.reference

pictures: setup ## take the pictures of the documents from the demo, in five minutes (ARGS="FOLDER" for every page)
	@scripts/setup browser
	@$(BIN)/python -m scripts.screenshots $(ARGS)

site: ## the documentation as a web site, in build/site; warnings are errors
	@scripts/setup docs
	@scripts/site
	@echo "open build/site/index.html"

format: setup ## rewrite the code the way check wants it
	@$(BIN)/ruff format --quiet $(CODE) examples
	@$(BIN)/ruff check --quiet --fix $(CODE) examples

# One lock serves every platform, and no index or path of this machine gets into it.
LOCK = $(BIN)/uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(ARGS)

lock: setup ## write requirements/*.txt from pyproject.toml (ARGS=--upgrade for the newest)
	@$(LOCK) pyproject.toml -o requirements/runtime.txt
	@$(LOCK) pyproject.toml --group dev --extra history --extra connect --extra java --extra gevent --extra top --extra web --extra oidc --extra otel --extra gcpubsub --extra celery --extra regex -c requirements/runtime.txt -o requirements/dev.txt
	@$(LOCK) --group bench -o requirements/bench.txt
	@$(LOCK) pyproject.toml --extra redis --group interop -o requirements/interop.txt
	@$(LOCK) --group interop55 -o requirements/interop55.txt
	@$(LOCK) --group docs -o requirements/docs.txt
	@$(LOCK) pyproject.toml --all-extras -c requirements/dev.txt -o requirements/extras.txt
	@$(LOCK) --group release -o requirements/release.txt

dist: setup ## build sdist and wheel into dist/, check them, run a task from the wheel (ARGS=vX.Y.Z: the tag)
	@scripts/setup release
	@$(BIN)/python -m scripts.release $(ARGS)

sbom: ## write what a release consists of, as CycloneDX, to dist/ (offline, from the lock)
	@scripts/setup release
	@$(BIN)/python -m scripts.sbom $(ARGS)

audit: ## known vulnerabilities of everything that `pip install 'umbel[…]'` may bring (asks OSV)
	@scripts/setup release
	@.venv-release/bin/pip-audit --strict --require-hashes --disable-pip --vulnerability-service osv -r requirements/extras.txt $(ARGS)

clean: ## remove what the targets made
	@rm -rf .venv .venv-bench .venv-celery .venv-celery55 .venv-docs .venv-release .venv-3.* .venv-pyodide build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
