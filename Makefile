PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Files with cases that the default tier runs without AOTAutograd.
CASES := $(addsuffix .py,$(addprefix tests/test_,attention_cases attention_models attention_strategies backend boundaries \
	docs edges flash_attention fuse_linear_cross_entropy loss_cases masks models register_attention shapes \
	vocab_head_compile zigzag))
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test test-processes test-alone test-slow lint setup clean

demo: setup
	$(BIN)/autosp train

# Two runs beside each other: tests that start several processes, one after another, and those of a single process,
# which would leave cores idle.
test: setup
	$(MAKE) --no-print-directory -j2 test-processes test-alone

test-processes: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "processes and not slow"

test-alone: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not processes and not slow"

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
