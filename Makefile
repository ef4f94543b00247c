# Everything sets itself up: a virtual environment in .venv, from the pinned requirements.lock.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: demo test test-all test-ssh test-slurm test-ray test-wheel lint docs bench torture clean

demo: .venv/.ready  ## train one program under every strategy, then on parameter servers
	$(BIN)/python -m replicax demo

test: .venv/.ready  ## the default suite, doctests included
# Three on two cores: many tests wait for processes.
	$(BIN)/python -m pytest -n 3 -m "not slow"

test-all: .venv/.ready  ## the default suite and the slow tests; compiles and starts as users do
	XLA_FLAGS= REPLICAX_TEST_COLD_STARTS=1 $(BIN)/python -m pytest -n 2

test-ssh: .venv/.ready  ## `replicax run --hosts` over a real sshd, from Debian's package
	tests/services/sshd.sh install
	$(BIN)/python -m pytest -n 0 -v tests/multiprocess/test_run_ssh.py

test-slurm: .venv/.ready  ## `replicax run --slurm` on a real Slurm, from Debian's packages; as root
	tests/services/slurm.sh install
	$(BIN)/python -m pytest -n 0 -v tests/multiprocess/test_slurm.py

test-ray: .venv/.ready  ## `replicax run --ray` and `rx.ray` on a real Ray cluster of this machine
	$(BIN)/python -m pytest -n 0 -v tests/multiprocess/test_ray.py

# Interpreters to install the wheel into; each gets the newest packages, the first the oldest too.
PYTHONS ?= python3.11 python3.12 python3.13

test-wheel: .venv/.ready  ## the wheel in fresh environments: README programs, demo, doctor, new
	$(BIN)/python tests/packaging/fresh_install.py --versions lowest --python $(firstword $(PYTHONS))
	for python in $(PYTHONS); do \
	  $(BIN)/python tests/packaging/fresh_install.py --python $$python || exit 1; done

lint: .venv/.ready  ## style, types, layers, spelling, words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell
# Splits identifiers into words, and finds those that docs/words.txt replaces.
	$(BIN)/codespell --regex '[A-Za-z][a-z]+' -D docs/words.txt

docs: .venv/.docs-ready  ## the documentation site, in out/docs/index.html; a warning is an error
	$(BIN)/python -m sphinx -b html -W --keep-going -q -j 2 docs out/docs

bench: .venv/.ready  ## speed, side by side with the peers; then the plots of docs/benchmarks.md
	$(BIN)/python -m benchmarks.run; found=$$?; \
	$(BIN)/python -m benchmarks.pictures --record && exit $$found

# How long the soak lasts.
MINUTES ?= 30

torture: .venv/.ready  ## faults of every kind, for hours: out/torture/table.md, soak.png
	$(BIN)/python -m torture.run --minutes $(MINUTES)

clean:
	rm -rf .venv .venv-peers out

.venv/.ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# Sphinx and what it needs come on top, for those who build the site.
.venv/.docs-ready: .venv/.ready docs/requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.lock
	touch $@
