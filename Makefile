# Everything a person or CI does with this repository. `make help` explains each target.
SHELL := /bin/bash
.DEFAULT_GOAL := help
UV_VERSION := 0.13.9
UV := .uv/bin/uv
RUN := $(UV) run --frozen --all-extras --no-sync
export OMP_NUM_THREADS := 1

.PHONY: help
help: ## Explain every target
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(UV):
	python3 -m venv .uv
	.uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

.venv/.synced: pyproject.toml uv.lock | $(UV)
	$(UV) sync --frozen --all-extras
	@touch $@

.PHONY: venv
venv: .venv/.synced ## Create .venv with every locked package
