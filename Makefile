PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Small cases, which the default tier runs without AOTAutograd.
CASES := $(addprefix tests/test_,attention_cases.py edges.py fuse_linear_cross_entropy.py loss_cases.py masks.py shapes.py)
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test test-slow lint setup clean

demo: setup
	$(BIN)/autosp train

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test,real-model]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow
	OMP_NUM_THREADS=1 AUTOSP_TEST_INNER=aot_eager $(BIN)/python -m pytest $(CASES)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy autosp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

setup: $(VENV)/.installed

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt is for Python 3.11 and newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch alone first: whichever build the machine offers (CPU or CUDA) is then kept by what follows.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
