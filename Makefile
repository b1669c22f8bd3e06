# Everything a person or CI does with this repository. `make help` explains each target.
SHELL := /bin/bash
.DEFAULT_GOAL := help
UV_VERSION := 0.13.9
UV := .uv/bin/uv
PY := .venv/bin/python
PYTEST := $(PY) -m pytest -q
# Each process has its part of the tests; one that has none left takes over some of another's, so that all end together.
TWO := -n 2 --dist worksteal

export OMP_NUM_THREADS := 1
# When make was called, in seconds since the epoch: the tour counts from here.
export MAKE_BEGAN := $(shell date +%s.%N)
# $(call downloaded,NAME,PYTHON): note what has taken since $$began, for the tour to print apart.
downloaded = $(2) -c "from cluster import progress; progress.record('$(1)', 'download', $$((SECONDS - began)))"
# The last line of a part's recipe: how long the part took. make expands a whole recipe before it runs the first line. TIMES names a file
# that gets these lines, too.
took = @echo "$@: $$(($$(date +%s) - $(shell date +%s))) s" | tee -a $(or $(TIMES),/dev/null)

.PHONY: help
help: ## Explain every target
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- the two commands of the README ---------------------------------------------------------------------------------

.PHONY: run
run: .venv/.run-synced ## Train a sample with three local workers and kill one on the way: under two minutes, no root, no cluster
	@$(PY) -m demo.local

.PHONY: demo
demo: venv ## Tour on a real one-machine cluster: kills, resizes, a trained model (root; KEEP=1 leaves the cluster running)
	@$(PY) -m demo $(if $(KEEP),--keep)

.PHONY: test
test: verify test-unit test-simulator test-trainer ## Tests that need neither root nor a cluster (REGROUP_SLOW=1: the slow ones, too)
	@echo "make test: $$(($$(date +%s) - $(basename $(MAKE_BEGAN)))) s"

# What measures no time runs beside tests/api, with a lower priority: it takes what they leave. They wait for most of theirs.
.PHONY: test-cluster
test-cluster: venv ## Tests with a real API server, kubelets and containers, and chaos (root; REGROUP_SLOW=1: the slow ones, too)
	@$(MAKE) --no-print-directory test-root
	@$(MAKE) --no-print-directory --jobs=3 --output-sync test-api test-chaos $(if $(REGROUP_CONTEXT),,images)
	@$(MAKE) --no-print-directory test-e2e

# --- its parts ------------------------------------------------------------------------------------------------------

.PHONY: verify
verify: venv docs ## Check that generated files are current; check style, types, layers and docstrings; build the site of docs/
	$(PY) -m regroup_operator.generate --check
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) -m harness.voice
	$(took)

.PHONY: test-unit
test-unit: venv ## Unit tests and the model of the protocol
	$(PYTEST) $(TWO) tests/model tests/unit
	$(took)

.PHONY: test-simulator
test-simulator: venv ## Random faults through operator and agents in memory: 1,200 walks with fixed seeds
	nice -n 19 $(PY) -m tests.simulator --walks 1200 --jobs 2
	$(took)

.PHONY: test-trainer
test-trainer: venv ## Tests with real trainer processes, gloo and SIGKILL
	$(PYTEST) $(TWO) --durations=20 tests/trainer
	$(took)

.PHONY: test-oldest
test-oldest: venv-oldest ## Unit and trainer tests with the oldest torch that Regroup runs with
	.venv-oldest/bin/python -m pytest -q $(TWO) tests/unit tests/trainer
	$(took)

.PHONY: test-frameworks
test-frameworks: venv venv-frameworks ## Samples of every framework: killed, stopped, grown, run to their end; real launchers
	REGROUP_SLOW=1 $(PYTEST) -n 2 --dist loadfile --durations=5 tests/trainer/test_frameworks.py tests/trainer/test_torch_frameworks.py
	.venv-torch-frameworks/bin/python -m pytest -q --durations=5 tests/unit/agent/test_launchers.py tests/trainer/test_launchers.py
	$(took)

.PHONY: programs
programs: | $(UV) ## Build kube-apiserver, kubectl, helm and the rest, unless the cache has them; needs no venv
	@nice -n 19 .uv/bin/python -m cluster build >/dev/null
	$(took)

.PHONY: images
images: venv ## Build Regroup's images for the one-machine cluster, unless they are current (root)
	@nice -n 19 $(PY) -m cluster build-images
	$(took)

.PHONY: test-root
test-root: venv ## Unit and trainer tests that make cgroups, become another user or run containerd (root)
	$(PYTEST) -m root tests/unit tests/trainer
	$(took)

.PHONY: test-api
test-api: venv ## Tests with a real kube-apiserver and etcd (built once, then cached)
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder tests/api  # by the alphabet, whose first files take longest
	$(took)

.PHONY: test-e2e
test-e2e: venv ## Tests with real kubelets and containers, power cuts included (root)
	$(PYTEST) -rP --durations=20 tests/e2e  # -rP: the figures that the tests measured
	$(took)

.PHONY: test-page
test-page: venv | .cache/axe/.installed ## The web page in Chromium: every view, by keyboard, in narrow windows, by axe-core (root, if Chromium is missing)
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; }
	$(PYTEST) --durations=5 tests/page
	$(took)

.cache/axe/.installed:
	@mkdir -p $(@D) && npm install --prefix $(@D) --no-save --ignore-scripts --silent axe-core@4.14.1 && touch $@

.PHONY: screenshots
screenshots: venv ## Make the pictures of the page in docs/how-to again (Chromium)
	$(PY) -m harness.screenshots docs/how-to

.PHONY: test-chaos
test-chaos: venv ## 40 random faults in four local jobs with fixed seeds: every kind and moment, both tiers
	nice -n 10 $(PY) -m chaos --seed 42193 --faults 40 --per-job 10
	$(took)

.PHONY: test-all
test-all: export REGROUP_SLOW := 1  # nothing is left out
test-all: export REGROUP_LONG := 1  # tests repeat what they break as often as their `trials` says
test-all: venv-wandb test test-cluster test-oldest test-frameworks test-page ## test, the same with the oldest torch, wider searches of the model, 750 more faults and 20,000 walks; skips jobs that passed before (root)
	$(PY) -m tests.model
	$(PY) -m chaos --seed 1000 --faults 600 --resume
	$(PY) -m chaos --seed 1000 --faults 100 --per-job 10 --model split --resume
	$(PY) -m chaos --seed 1000 --faults 50 --where cluster --resume
	$(PY) -m tests.simulator --first 10000 --walks 20000 --jobs 2

.PHONY: chaos
chaos: venv ## Random faults in real jobs, and a verdict: SEED=7 replays, FAULTS=1000, PER_JOB=100, CHAOS=cluster (root), MODEL=split, RESUME=1
	@$(PY) -m chaos $(if $(SEED),--seed $(SEED)) $(if $(FAULTS),--faults $(FAULTS)) $(if $(CHAOS),--where $(CHAOS)) \
	  $(if $(PER_JOB),--per-job $(PER_JOB)) $(if $(MODEL),--model $(MODEL)) $(if $(RESUME),--resume)

.PHONY: bench-recovery
bench-recovery: venv ## SIGKILL -> next step, Regroup beside torchft and torchrun: tables and bench/out/recovery.json (TRIALS=5, WITHOUT=torchft)
	$(PY) -m bench.recovery $(if $(TRIALS),--trials $(TRIALS)) $(if $(WITHOUT),--without $(WITHOUT))

.PHONY: bench-goodput
bench-goodput: venv ## Share of time in steps that stay, under kills, beside torchft and torchrun: bench/out/goodput.json (SECONDS=60, WITHOUT=torchft)
	$(PY) -m bench.goodput $(if $(SECONDS),--seconds $(SECONDS)) $(if $(WITHOUT),--without $(WITHOUT))

.PHONY: bench-overhead
bench-overhead: venv ## Time of a step in a session and under plain DDP: a table and bench/out/overhead.json
	$(PY) -m bench.overhead

.PHONY: bench-strategies
bench-strategies: venv ## What each strategy costs beside torch alone, at a failure and at a resize: a table in docs/how-to/which-strategy.md (PAIRS=10, TRIALS=3)
	$(PY) -m bench.strategies $(if $(PAIRS),--pairs $(PAIRS)) $(if $(TRIALS),--trials $(TRIALS)) --figure docs/how-to/strategies.svg --page docs/how-to/which-strategy.md

.PHONY: bench-tiers
bench-tiers: venv ## What memory snapshots and checkpoints cost: a table and bench/out/tiers.json
	$(PY) -m bench.tiers

.PHONY: bench-gpu
bench-gpu: venv ## Does Regroup hold on this machine's GPUs, and how fast is it? A table and bench/out/gpu.json (ONLY=kills, DEVICE=cpu for a dry run)
	$(PY) -m bench.gpu $(if $(ONLY),--only $(ONLY)) $(if $(DEVICE),--device $(DEVICE))

.PHONY: bench-quotas
bench-quotas: venv ## Equal shares and shares by speed, one of four ranks slowed twofold: a table and bench/out/quotas.json
	$(PY) -m bench.quotas

.PHONY: bench-scale
bench-scale: venv ## Pods a second, API requests, CPU and memory beside JobSet, Trainer and Job: tables and bench/out/scale.json (JOBS=500, ONLY="job jobset", QUICK=1)
	$(PY) -m bench.scale $(if $(JOBS),--jobs $(JOBS)) $(if $(ONLY),--only $(ONLY)) $(if $(QUICK),--quick) $(if $(QUICK)$(ONLY),,--figure docs/reference/scale.svg)

.PHONY: cluster-up
cluster-up: venv ## Start the one-machine Kubernetes and leave it running (root)
	$(PY) -m cluster up

.PHONY: cluster-down
cluster-down: venv ## Stop the one-machine Kubernetes and remove its state; caches stay (root)
	$(PY) -m cluster down

.PHONY: generate
generate: venv ## Generate the CRD, its copy in the chart, the plain install, the reference pages and the pictures of the rooms
	$(PY) -m regroup_operator.generate
	$(PY) -m regroup_cli.reference docs/reference/commands.md
	$(PY) -m harness.python_reference docs/reference/python.md
	$(PY) -m harness.notebook docs/tutorials/from-python.ipynb docs/tutorials/from-python.md
	$(PY) -m harness.frameworks docs/reference/frameworks.md
	$(PY) -m manifests.dashboards
	$(PY) -m manifests.render
	$(PY) -m harness.rooms regroup docs/design/rooms-after.svg
	$(PY) -m harness.rooms regroup_operator docs/design/operator-after.svg

.PHONY: docs
docs: .venv-docs/.synced ## Build the site of docs/ into build/site; a dead link or anchor fails
	.venv-docs/bin/zensical build --strict

.PHONY: docs-serve
docs-serve: .venv-docs/.synced ## Serve the site on http://localhost:8000, and build it again when a page changes
	.venv-docs/bin/zensical serve

.PHONY: changelog
changelog: .venv-docs/.synced ## Collect the fragments of changelog.d into CHANGELOG.md: VERSION=0.2.0 (DRAFT=1 prints them only)
	@.venv-docs/bin/towncrier build --yes $(if $(DRAFT),--draft) --version $(or $(VERSION),$(error make changelog needs the version of the release: VERSION=0.2.0))

.PHONY: dist
dist: venv ## Build the files of a release into dist/: wheel, sdist, chart, install.yaml, SBOM, checksums
	@$(PY) -m manifests.dist --uv $(UV) dist

.PHONY: fix
fix: venv ## Fix style automatically
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# What `make run` needs. `make venv` has it, too.
.venv/.run-synced: pyproject.toml uv.lock | $(UV)
	@if [ -e .venv/.synced ]; then $(MAKE) --no-print-directory venv; else \
	  $(UV) sync --frozen --no-default-groups --group newest-torch --group sample --extra operator --extra cli --extra trainer; fi
	@touch $@

.PHONY: venv
venv: .venv/.synced ## Install every locked package into .venv

.venv/.synced: pyproject.toml uv.lock | $(UV)
	@began=$$SECONDS; $(UV) sync --frozen --all-extras && $(call downloaded,Python packages,$(PY))
	@$(UV) sync --frozen --all-extras --compile-bytecode
	@touch $@

.PHONY: venv-oldest
venv-oldest: .venv-oldest/.synced ## Install every locked package into .venv-oldest, with the oldest torch (5 GB)

.venv-oldest/.synced: pyproject.toml uv.lock | venv
	@began=$$SECONDS; UV_PROJECT_ENVIRONMENT=.venv-oldest $(UV) sync --frozen --all-extras --no-group newest-torch --group oldest-torch \
	  --compile-bytecode && $(call downloaded,Python packages with the oldest torch,$(PY))
	@touch $@

.PHONY: venv-frameworks
venv-frameworks: .venv-frameworks/.synced .venv-torch-frameworks/.synced ## Install JAX, XGBoost and TensorFlow into .venv-frameworks, for CPUs (2.2 GB), and what needs torch into .venv-torch-frameworks (110 MB)

# Apart from .venv: it stands for a user's image, in which nothing of ours is. tf-keras wants the large package of TensorFlow.
.venv-frameworks/.synced: tests/trainer/frameworks.txt | venv
	@$(UV) venv --quiet --allow-existing --python $(PY) .venv-frameworks
	@$(UV) pip install --quiet --python .venv-frameworks/bin/python --requirement $< --override <(echo "tensorflow ; python_version < '3'")
	@touch $@

# It sees .venv by a .pth file, so there is no second torch (4.6 GB). DeepSpeed's setup imports torch and would build CUDA operators.
.venv-torch-frameworks/.synced: tests/trainer/torch-frameworks.txt uv.lock | venv
	@$(UV) venv --quiet --allow-existing --python $(PY) .venv-torch-frameworks
	@$(PY) -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  >"$$(.venv-torch-frameworks/bin/python -c 'import site; print(site.getsitepackages()[0])')/of-venv.pth"
	@DS_BUILD_OPS=0 $(UV) pip install --quiet --python .venv-torch-frameworks/bin/python --no-deps --no-build-isolation --requirement $<
	@sed '1s|.*|#!$(CURDIR)/.venv-torch-frameworks/bin/python|' .venv/bin/torchrun >.venv-torch-frameworks/bin/torchrun
	@chmod +x .venv-torch-frameworks/bin/torchrun
	@touch $@

.PHONY: venv-wandb
venv-wandb: .venv-wandb/.synced ## Install wandb into .venv-wandb (80 MB), for the test of the page on Weights & Biases

.venv-wandb/.synced: tests/trainer/wandb.txt | venv
	@$(UV) venv --quiet --allow-existing --python $(PY) .venv-wandb
	@$(UV) pip install --quiet --python .venv-wandb/bin/python --requirement $<
	@touch $@

# Apart from .venv, which needs nothing of it: 100 MB.
.venv-docs/.synced: pyproject.toml uv.lock | $(UV)
	@UV_PROJECT_ENVIRONMENT=.venv-docs $(UV) sync --frozen --only-group docs
	@touch $@

$(UV):
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: python3 is older than 3.11. Install Python 3.11 or newer." >&2; exit 1; }
	@began=$$SECONDS; python3 -m venv .uv && \
	  .uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION) && $(call downloaded,uv,python3)

.PHONY: clean
clean: ## Remove everything that was built here, including caches
	rm -rf .venv .venv-oldest .venv-frameworks .venv-torch-frameworks .venv-wandb .venv-docs .uv .cache build dist bench/out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
