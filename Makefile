# Every target does its own set-up. PYTHON is the interpreter that .venv is made with.
PYTHON ?= python3
BIN := .venv/bin
# Of the emulated Arm machines of `make test-fleet`, outside of the checkout.
ARM_ROOT ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/coldpress/arm-root

.PHONY: setup demo test test-slow test-fleet check format bench ui clean
.DELETE_ON_ERROR:

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@command -v g++ >/dev/null || { echo "g++ is needed to build Inductor payloads: install a C++ compiler (Debian: apt-get install g++)"; exit 1; }
	@echo "installing coldpress and what campaigns and tests need into .venv (some minutes, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --quiet --upgrade pip --constraint constraints.txt
	@$(BIN)/python -m pip install --quiet --quiet --editable '.[torch,stores,signing]' --group pipeline --group serving --group dev \
		--constraint constraints.txt --build-constraint constraints.txt
	@touch $@

demo: setup
	@$(BIN)/python -m examples.prepare
	@$(BIN)/coldpress optimize examples/catalog.yaml --campaign demo

test: setup
	@$(BIN)/python -m pytest -m "not gpu and not slow" --numprocesses 2 --dist loadfile

test-slow: setup
	@$(BIN)/python -m pytest -m slow

test-fleet: setup
	@tests/fleet/root-filesystem.sh "$(ARM_ROOT)" $(BIN)/python
	@COLDPRESS_ARM_ROOT="$(ARM_ROOT)" $(BIN)/python -m pytest tests/fleet --durations 0

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	@$(BIN)/python -m pip install --quiet --group bench --constraint constraints.txt || echo "Olive cannot be installed; continuing without it"
	@mkdir -p .bench
	@$(BIN)/python -m examples.prepare zoo --tracking-uri sqlite:///.bench/mlflow.db
	$(BIN)/python -m benchmarks.peers

ui: setup
	@$(BIN)/python -c "from pipeline.tracking.connection import connect; from pipeline.tracking.projection import gains_link, open_experiment; \
		uri = 'sqlite:///mlflow.db'; print(gains_link('http://127.0.0.1:5000', open_experiment(connect(uri), uri)))"
	@MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow ui --backend-store-uri sqlite:///mlflow.db --port 5000 --workers 1

clean:
	rm -rf .venv store mlflow.db mlartifacts mlruns pulled examples/data .bench report-*.html
