# Two commands do it all on a machine with python3 and make: `make run` and `make test`.
.POSIX:
MODEL = smollm2-135m
PROMPT =
export MODEL PROMPT

.PHONY: help run serve test test-slow check format bench clean

help:
	@echo 'make run [PROMPT="..."] [MODEL=name]   answer one question; in a terminal without PROMPT: chat'
	@echo 'make serve [MODEL=name]                OpenAI-compatible server on 127.0.0.1:8080'
	@echo 'make test                              all fast tests and the checks'
	@echo 'make test-slow                         the slow suites in full'
	@echo 'make check                             lint, format, types, import rules'
	@echo 'make bench                             decode and prefill against mlx-lm'

run:
	@.ci/setup
	@if [ -n "$$PROMPT" ]; then .venv/bin/mlxinfer run -m "$$MODEL" "$$PROMPT"; \
	elif [ -t 0 ] && [ -t 1 ]; then .venv/bin/mlxinfer run -m "$$MODEL"; \
	else .venv/bin/mlxinfer run -m "$$MODEL" "What is the capital of France?"; fi

serve:
	@.ci/setup
	@.venv/bin/mlxinfer serve "$$MODEL"

test:
	@.ci/setup dev
	@.venv/bin/python -m pytest -q $(ARGS)

test-slow:
	@.ci/setup dev
	@.venv/bin/python -m pytest -q -m slow $(ARGS)

check:
	@.ci/setup dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports --no-cache

format:
	@.ci/setup dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench:
	@.ci/setup dev
	.venv/bin/python -m tests.bench

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
