# Everything runs in .venv inside the clone; the first target that needs it makes it.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AS_ROOT := $(shell [ "$$(id -u)" -eq 0 ] || echo sudo --preserve-env=DEBIAN_FRONTEND)
DEBIAN := chromium ffmpeg zsh libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6

.PHONY: help demo test test-guides test-gpu test-ray test-slow test-system system-packages test-readers test-lerobot test-lerobot-newest test-aloha test-openpi test-wandb test-simulators test-libero check docs wheel release bench bench-pages bench-setup format clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

# torch goes first and alone: its CPU build is found by pip under this exact version only
$(STAMP): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps -e . gym-aloha==0.1.5  # of gym-aloha only the model files are used
	touch $(STAMP)

demo: $(STAMP)  ## Set up, then the whole story in a few minutes
	$(BIN)/headrace demo

check: $(STAMP)  ## Lint, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_english.py

test: check  ## Checks and the test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-guides: $(STAMP)  ## Run what README, docs, examples and CONTRIBUTING show
	$(BIN)/python -m pytest -n 2 --dist loadfile -m guides

test-gpu: $(STAMP)  ## GPU code on a pretend device, and on torch's meta device
	$(BIN)/python -m pytest -n 2 --dist loadfile -m gpu

test-ray: $(STAMP)  ## Evaluations and recordings over Ray's worker processes
	$(BIN)/python -m pytest -m "ray and not slow"

test-slow: $(STAMP)  ## Long trainings and kill tests
	$(BIN)/python -m pytest -m slow

test-system: $(STAMP)  ## Tests that need Debian packages (a browser, GL)
	MUJOCO_GL=egl $(BIN)/python -m pytest -m system  # MuJoCo's own renderer asks for a display otherwise

system-packages:  ## Install the Debian packages of test-system
	$(AS_ROOT) apt-get update -qq
	DEBIAN_FRONTEND=noninteractive $(AS_ROOT) apt-get install -y -qq --no-install-recommends $(DEBIAN) >/dev/null

test-readers: $(STAMP)  ## LeRobot, Minari, robomimic and h5py open our exports (their own environments)
	scripts/setup_readers.sh
	$(BIN)/python tests/recording/readers_check.py

test-lerobot: $(STAMP)  ## LeRobot's own classes: we play its policies (its own environment)
	scripts/setup_lerobot.sh
	PYTHONPATH=src .venv-lerobot/bin/python -m pytest -p no:cacheprovider -W default tests/policies/lerobot_policies_check.py

test-lerobot-newest: $(STAMP)  ## The same with LeRobot's newest release (python3.12, or PYTHON312=…; its own environment)
	scripts/setup_lerobot.sh newest
	PYTHONPATH=src .venv-lerobot-newest/bin/python -m pytest -p no:cacheprovider -W default tests/policies/lerobot_policies_check.py

test-aloha: $(STAMP)  ## The genuine gym-aloha: our ALOHA tasks are the same (its own environment: it needs MuJoCo 3)
	scripts/setup_aloha.sh
	.venv-aloha/bin/python tests/envs/tasks/aloha_reference.py .venv-aloha/reference.npz
	HEADRACE_ALOHA_REFERENCE=.venv-aloha/reference.npz $(BIN)/python -m pytest -n 0 tests/envs/tasks/test_aloha.py

test-openpi: $(STAMP)  ## openpi's own client talks to headrace serve (its own environment: it needs numpy 1)
	scripts/setup_openpi.sh
	$(BIN)/python -m pytest tests/policies/serving/openpi_client_check.py

test-wandb: $(STAMP)  ## The genuine Weights & Biases, offline: curves, bundle and checkpoint (its own environment)
	scripts/setup_wandb.sh
	PYTHONPATH=src .venv-wandb/bin/python -m pytest -p no:cacheprovider -n 0 tests/bench/wandb_check.py

test-simulators: $(STAMP)  ## robosuite, mjlab, MetaWorld and PushT in interpreters of their own
	scripts/setup_simulators.sh
	$(BIN)/python -m pytest -n 0 tests/bridges/robosuite_check.py tests/bridges/mjlab_check.py tests/evaluation/benchmarks_check.py

test-libero: $(STAMP)  ## The genuine LIBERO: our tasks are the same (its own environment; assets from $$HEADRACE_LIBERO_ASSETS)
	scripts/setup_libero.sh
	$(BIN)/headrace libero export --python .venv-libero/bin/python
	.venv-libero/bin/python tests/envs/tasks/libero/genuine_reference.py .venv-libero/reference.npz \
	  $$($(BIN)/python -c "from headrace.envs.tasks.libero.exported import *; print(find_assets(), export_directory())")
	HEADRACE_LIBERO_REFERENCE=$(CURDIR)/.venv-libero/reference.npz $(BIN)/python -m pytest -n 0 tests/envs/tasks/libero/libero_check.py

docs: $(STAMP)  ## Build the site into site/, warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(STAMP)  ## Build wheel and sdist into dist/
	$(BIN)/python -m build --no-isolation

release: wheel  ## Try wheel and sdist in an empty environment; TAG=vX.Y.Z must be the version
	test -z "$(TAG)" || grep -qx '__version__ = "$(TAG:v%=%)"' src/headrace/__init__.py
	$(BIN)/python -m pytest -m slow tests/test_install.py

bench-setup: $(STAMP)  ## Install the peer libraries that benchmarks compare with
	benchmarks/setup.sh
	scripts/setup_openpi.sh
	scripts/setup_lerobot.sh
	scripts/setup_aloha.sh
	scripts/setup_libero.sh
	scripts/setup_simulators.sh robosuite mjlab

bench: bench-setup  ## Every benchmark, quick form, one after the other
	$(BIN)/python benchmarks/stepping.py --quick
	.venv-bench/bin/python benchmarks/vision.py --quick
	.venv-bench/bin/python benchmarks/replay.py --quick
	.venv-bench/bin/python benchmarks/learning.py --quick
	$(BIN)/python benchmarks/chunking.py --quick
	$(BIN)/python benchmarks/serving.py --quick
	$(BIN)/python benchmarks/distributed.py --quick
	$(BIN)/python benchmarks/bridges.py --quick
	$(BIN)/python benchmarks/recording.py --quick
	$(BIN)/python benchmarks/overhead.py --quick
	$(BIN)/python benchmarks/bridges_batched.py --quick
	$(BIN)/python benchmarks/libraries.py --quick
	$(BIN)/python benchmarks/aloha.py --quick
	$(BIN)/python benchmarks/libero.py --quick

bench-pages: bench-setup  ## Every benchmark in full form, alone on the machine: pages of docs/benchmarks (two hours; goes on where it stopped)
	$(BIN)/python scripts/bench_pages.py

format: $(STAMP)  ## Format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove environments and build products
	rm -rf .venv* dist build site
