# Two commands do it all on a machine with python3 and make: `make run` and `make test`.
# $(value …) hands a question on as it was written: make must not expand the $ in it.
MODEL ?= smollm2-135m
PROMPT ?=
override MODEL := $(value MODEL)
override PROMPT := $(value PROMPT)
export MODEL PROMPT

.PHONY: help run serve app test test-slow test-sanitize check format bench app-bundle clean

help:
	@echo 'make run [PROMPT="..."] [MODEL=name]   answer one question; in a terminal without PROMPT: chat'
	@echo 'make serve [MODEL=name]                OpenAI-compatible server on 127.0.0.1:8080'
	@echo 'make app                               the chat, in a window or the browser'
	@echo 'make test                              all fast tests and the checks'
	@echo 'make test-slow                         the slow suites in full'
	@echo 'make test-sanitize                     the CPU kernels under ASan and UBSan (Linux, g++)'
	@echo 'make check                             lint, format, types, import rules'
	@echo 'make app-bundle                        the app as one folder, on a Mac mlxinfer.app (docs/packaging.md)'
	@echo 'make bench                             decode and prefill against mlx-lm'

run:
	@.ci/setup
	@if [ -n "$$PROMPT" ]; then exec .venv/bin/python -m mlxinfer run -m "$$MODEL" -- "$$PROMPT"; \
	elif [ -t 0 ] && [ -t 1 ]; then exec .venv/bin/python -m mlxinfer run -m "$$MODEL"; \
	elif [ -p /dev/stdin ] || [ -f /dev/stdin ]; then exec .venv/bin/python -m mlxinfer run -m "$$MODEL" -; \
	else echo 'No PROMPT; asking: What is the capital of France?' >&2; \
		exec .venv/bin/python -m mlxinfer run -m "$$MODEL" "What is the capital of France?"; fi

serve:
	@.ci/setup
	@exec .venv/bin/python -m mlxinfer serve "$$MODEL"

app:
	@.ci/setup app
	@exec .venv/bin/python -m mlxinfer app $(ARGS)

test:
	@.ci/setup dev
	@.venv/bin/python -m pytest -q $(ARGS)

test-slow:
	@.ci/setup dev
	@.venv/bin/python -m pytest -q -m slow $(ARGS)

test-sanitize:
	@.ci/setup dev
	@tests/sanitize/run $(ARGS)

check:
	@.ci/setup dev
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m pyright
	.venv/bin/lint-imports --no-cache

format:
	@.ci/setup dev
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

bench:
	@.ci/setup dev
	.venv/bin/python -m tests.bench

app-bundle:
	@.ci/setup bundle
	.venv/bin/python -m PyInstaller --noconfirm --log-level WARN app/packaging/mlxinfer.spec

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
