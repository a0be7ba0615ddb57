# The commands of the README. `make demo` and `make test` need Python 3.10 or newer and a C compiler; they set up .venv
# and change nothing outside it. PYTHON chooses the Python to start from: `make test PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
READY := $(VENV)/.ready

.PHONY: demo test test-gpu lint clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(RUN) -m deep_tile demo

test: $(READY)
	$(RUN) -m pytest

# On a machine with a Hopper GPU, in whichever Python is given, with the packages that it has.
test-gpu:
	$(PYTHON) setup.py --quiet build_ext --inplace
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) tests/run_gpu.py

lint: $(READY)
	$(PIP) install --quiet --constraint constraints.txt ruff
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

clean:
	rm -rf $(VENV) build dist deep_tile.egg-info deep_tile/_launcher.abi3.so .pytest_cache .ruff_cache .hypothesis
	find deep_tile tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# ---- set-up

# Prints the extra that goes with an installed torch which satisfies pyproject.toml, and nothing where there is none.
define REUSABLE_TORCH
import re, sys
try:
    import torch
except (ImportError, OSError):
    sys.exit()
wanted = re.search(r'"torch>=(\d+)\.(\d+)"', open("pyproject.toml").read()).groups()
if tuple(map(int, torch.__version__.split(".")[:2])) >= tuple(map(int, wanted)):
    print("cu12" if (torch.version.cuda or "").startswith("12.") else "cu13")
endef

# Prints a .pth file that shows the packages of $(PYTHON) to the new environment. Unlike --system-site-packages it also
# works where $(PYTHON) lives in a virtual environment itself.
define PACKAGE_FOLDERS
import sys
print(*(folder for folder in sys.path if folder.endswith("-packages")), sep="\n")
endef

# Prints what deep_tile with the extras named by the arguments needs besides torch. pip is not asked for torch where one
# is re-used: torch for CUDA 12.8 pins an older NVRTC than ours, and pip would download another torch to settle that.
define OTHER_DEPENDENCIES
import sys
from importlib.metadata import requires
for line in requires("deep_tile"):
    dependency, _, condition = line.partition("; extra == ")
    if not dependency.startswith("torch") and (not condition or condition.strip('"') in sys.argv[1:]):
        print(dependency)
endef

export REUSABLE_TORCH PACKAGE_FOLDERS OTHER_DEPENDENCIES

$(RUN):
	$(PYTHON) -m venv $(VENV)

# constraints.txt holds one whole set of versions, torch among them; beside another torch it has no meaning.
$(READY): $(RUN) pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	@set -e; extra=$$($(PYTHON) -c "$$REUSABLE_TORCH"); \
	if [ -n "$$extra" ]; then \
		echo "Re-using the torch of $(PYTHON), with the extra $$extra"; \
		$(PYTHON) -c "$$PACKAGE_FOLDERS" >"$$(echo $(VENV)/lib/python*/site-packages)/reused.pth"; \
		$(PIP) install --no-deps --editable .; \
		$(RUN) -c "$$OTHER_DEPENDENCIES" $$extra test bench | xargs $(PIP) install; \
	else \
		$(PIP) install --constraint constraints.txt --editable '.[cu13,test,bench]'; \
	fi
	@touch $@
