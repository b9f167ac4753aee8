# Every task of the project is a target here; `make help` lists them. Arguments: ARGS='...' and NAME=value.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python
ARGS ?=
NAME := # the command line's alone: WSL exports a NAME of its own
AS := # likewise: make itself knows an assembler by it

.PHONY: help
help: ## this list
	@[ -t 1 ] && bold=$$'\033[1m' plain=$$'\033[0m' || bold= plain=; awk -v b="$$bold" -v p="$$plain" -F':.*## ' '/^[a-z-]+:.*## /{printf "  %s%-22s%s %s\n", b, $$1, p, $$2}' $(MAKEFILE_LIST)

## ---- set-up -------------------------------------------------------------------------------------------------------
.PHONY: install lock
install: engine-check .venv/.installed .venv-engine/.installed ## .venv (gateway, scripts, tests) and .venv-engine (vLLM for CPU)

.PHONY: engine-check
engine-check: # before the first download: a machine that cannot run the engine is told so in one line
	@$(PYTHON) -m scripts.engine_check

.venv/.installed: docker/requirements/dev.txt
	@$(PYTHON) -m venv .venv
	@scripts/step.sh "gateway, scripts and tests" .venv/install.log .venv/bin/pip install -q --disable-pip-version-check --no-input --require-hashes -r $<
	@touch $@

.venv-engine/.installed: docker/requirements/engine-cpu.txt docker/vllm-alias/pyproject.toml scripts/engine_install.sh
	@scripts/engine_install.sh $(PYTHON) .venv-engine
	@touch $@

# The quantization job and both its producers; torch comes as its CPU build where there is one.
.venv-quantize/.installed: docker/requirements/quantize.txt scripts/quantize_install.sh
	@scripts/quantize_install.sh $(PYTHON) .venv-quantize
	@touch $@

# The official clients of tests/conformance, with a node for node's.
.venv-clients/.installed: docker/requirements/clients.txt tests/conformance/node/package-lock.json
	@$(PYTHON) -m venv .venv-clients
	@scripts/step.sh "clients of the gateway" .venv-clients/install.log .venv-clients/bin/pip install -q --disable-pip-version-check --no-input --require-hashes -r $<
	@scripts/step.sh "node's client of it" .venv-clients/install.log .venv-clients/bin/npm ci --prefix tests/conformance/node --no-audit --no-fund --ignore-scripts
	@touch $@

# What `make bench-gateway ARGS=--peers` measures beside the gateway.
.venv-peers/.installed: docker/requirements/peers.txt
	@$(PYTHON) -m venv .venv-peers
	@scripts/step.sh "the gateway's peers" .venv-peers/install.log .venv-peers/bin/pip install -q --disable-pip-version-check --no-input --require-hashes -r $<
	@touch $@

lock: ## pin the newest versions the ranges of pyproject.toml allow (needs uv on PATH)
	uv pip compile -q --generate-hashes --no-header --python-version 3.11 --extra tracing pyproject.toml -o docker/requirements/gateway.txt $(ARGS)
	uv pip compile -q --generate-hashes --no-header --python-version 3.11 --extra scripts --extra tracing --extra dev -c docker/requirements/gateway.txt pyproject.toml -o docker/requirements/dev.txt $(ARGS)
	uv pip compile -q --generate-hashes --no-header --python-version 3.11 --extra clients -c docker/requirements/gateway.txt pyproject.toml -o docker/requirements/clients.txt $(ARGS)
	uv pip compile -q --generate-hashes --no-header --python-version 3.11 --python-platform x86_64-manylinux_2_28 --excludes docker/requirements/engine-cpu.excludes docker/requirements/engine-cpu.in -o docker/requirements/engine-cpu.txt $(ARGS)
	uv pip compile -q --generate-hashes --no-header --python-version 3.11 --python-platform x86_64-manylinux_2_28 --excludes docker/requirements/quantize.excludes docker/requirements/quantize.in -o docker/requirements/quantize.txt $(ARGS)
	uv pip compile -q --generate-hashes --no-header --python-version 3.11 --python-platform x86_64-manylinux_2_28 --excludes docker/requirements/peers.excludes docker/requirements/peers.in -o docker/requirements/peers.txt $(ARGS)

## ---- on this machine, without Docker ------------------------------------------------------------------------------
.PHONY: model
MODEL_NAME = $(if $(filter model,$(MAKECMDGOALS)),$(NAME))
model: $(if $(MODEL_NAME),,engine-check) .venv/.installed $(if $(MODEL_NAME),,.venv-engine/.installed) ## the small chat model, into the user's cache; NAME=org/model[@revision] or NAME=/path: that one, into MODELS_DIR (AS=name)
	@$(PY) -m $(if $(MODEL_NAME),scripts.model_fetch_named '$(NAME)' $(if $(AS),--as '$(AS)'),scripts.model_fetch) $(if $(filter model,$(MAKECMDGOALS)),$(ARGS))

.PHONY: demo
demo: model ## engine, gateway and Prometheus here, and a chat through them; ARGS=--once ends after it
	@$(PY) -m scripts.demo $(ARGS)

## ---- checks -------------------------------------------------------------------------------------------------------
.PHONY: check lint test test-unit test-wire test-bench test-engine-args test-engine
check: lint test ## everything a commit must pass

lint: .venv/.installed ## ruff, mypy --strict, shellcheck, yamllint
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	.venv/bin/mypy && .venv/bin/mypy docker/engine && .venv/bin/mypy tests/stack
	.venv/bin/yamllint -s compose.yaml configs
	git ls-files '*.sh' .ci/run | xargs .venv/bin/shellcheck

test: test-unit test-rules test-wire test-bench test-engine-args test-engine ## all tests: pure rooms, rules, real sockets, real engine

test-unit: .venv/.installed ## the pure rooms
	@scripts/stage.sh unit $(PY) -m pytest tests/unit -n 2 --dist loadfile $(ARGS)

test-wire: .venv/.installed ## the gateway over real sockets against the scripted engine
	@scripts/stage.sh wire $(PY) -m pytest tests/wire $(ARGS)

test-bench: .venv/.installed ## make bench on the scripted engine: what is reused, what an end by force leaves, steps meant to fail
	@scripts/stage.sh bench $(PY) -m pytest tests/bench -n 2 $(ARGS)

test-engine-args: model ## profiles, flags and the memory plan against the pinned engine's own code
	@scripts/stage.sh engine-args $(PY) -m pytest tests/engine_args $(ARGS)

test-engine: model ## the gateway in front of a real vLLM on CPU
	@scripts/stage.sh engine $(PY) -m pytest tests/engine $(ARGS)

## ---- the stack ----------------------------------------------------------------------------------------------------
.PHONY: up up-cpu down upgrade backup restore verify-grafana replicas logs ps shell-engine test-stack
up: .venv/.installed ## the stack on this machine's GPU: checked, started, waited for; ARGS=--dry-run only says
	@$(PY) -m scripts.up $(ARGS)

up-cpu: .venv/.installed ## the stack without a GPU, with the small model
	@$(PY) -m scripts.up --cpu $(ARGS)

down: .venv/.installed ## end the streams, then stop the stack; volumes stay
	@$(PY) -m scripts.down $(ARGS)

upgrade: .venv/.installed ## another image of the engine, under load, with its way back: ENGINE_IMAGE=vllm/vllm-openai:v0.33.0
	@$(PY) -m scripts.upgrade $(if $(ENGINE_IMAGE),'$(ENGINE_IMAGE)') $(ARGS)

backup: .venv/.installed ## one file of keys, settings, usage ledger and Prometheus's data; FILE=backups/NAME.tar
	@$(PY) -m scripts.backup $(if $(FILE),'$(FILE)') $(ARGS)

restore: .venv/.installed ## put a backup back, on a stopped stack: FILE=backups/NAME.tar ARGS=--replace
	@$(PY) -m scripts.restore $(if $(FILE),'$(FILE)') $(ARGS)

verify-grafana: .venv/.installed ## data source, every dashboard and query of the running Grafana, and again after a restart
	@$(PY) -m scripts.verify_grafana $(ARGS)

replicas: .venv/.installed ## the engines as the gateway sees them; ARGS='--drain URL' takes one out by hand, '--back URL' brings it back
	@$(PY) -m scripts.replicas $(ARGS)

logs: ## follow the logs; SERVICE=gateway for one of them
	@scripts/compose.sh logs --follow --tail 100 $(SERVICE)

ps: ## what runs, and how well
	@scripts/compose.sh ps --all

shell-engine: ## a shell in the engine's container
	@scripts/compose.sh shell-engine

test-stack: install model $(if $(ARGS),,.venv-quantize/.installed) ## all of it on a real engine in real containers, its faults and upgrades too; ARGS='-m ci' the short part
	@scripts/stage.sh stack $(PY) -m pytest tests/stack $(ARGS)

## ---- measuring ----------------------------------------------------------------------------------------------------
.PHONY: bench bench-ladder bench-compare tune
bench: .venv/.installed ## measure by a plan: PLAN=configs/bench/smoke.yaml, on engines of its own or ARGS='--engine URL --tokenizer DIR'
	@$(PY) -m scripts.bench $(or $(PLAN),configs/bench/workloads.yaml) $(ARGS)

bench-ladder: .venv/.installed ## the guide's headline, climbed step by step on your card: ARGS='--image vllm/vllm-openai:v0.32.0'
	@$(PY) -m scripts.bench $(or $(PLAN),configs/bench/ladder.yaml) $(ARGS)

tune: .venv/.installed ## the flags and limits that serve the most within the SLO: PROFILE=llama3-8b-awq.rtx4090 ARGS='--model DIR --image IMAGE'
	@$(PY) -m scripts.tune '$(PROFILE)' $(ARGS)

.PHONY: test-tune
test-tune: model ## make tune on the real engine: beats a bad profile, keeps a good one (ARGS='-m ci': the short part)
	@scripts/stage.sh tune $(PY) -m pytest tests/tune $(ARGS)

bench-compare: .venv/.installed ## two runs side by side: A=results/bench/one B=results/bench/other
	@$(PY) -m scripts.bench.compare '$(A)' '$(B)' $(ARGS)

.PHONY: bench-gateway bench-window bench-cpu soak
bench-gateway: .venv/.installed $(if $(filter --peers,$(ARGS)),.venv-peers/.installed) ## what the gateway adds: latency, requests per CPU-second, memory; ARGS=--peers beside vllm-router and LiteLLM
	@$(PY) -m scripts.bench_gateway $(ARGS)

bench-window: .venv/.installed ## does the micro-batching window pay? ENGINE=http://127.0.0.1:8000, or the scripted one
	@$(PY) -m scripts.bench_window $(if $(ENGINE),--engine '$(ENGINE)') $(ARGS)

bench-cpu: .venv/.installed ## CPU time of the gateway's own Python: a request, a stream's event
	@$(PY) -m scripts.bench_cpu $(ARGS)

soak: .venv/.installed ## an hour of a thousand streams and ten minutes of ten times too much; does anything grow?
	@$(PY) -m scripts.soak $(ARGS)

## ---- rules and alerts ---------------------------------------------------------------------------------------------
.PHONY: rules test-rules mutate-rules
rules: .venv/.installed ## configs/prometheus/rules and the tables of docs/metrics.md, from scripts/rules and configs/slo.yaml
	@$(PY) -m scripts.rules $(ARGS)

test-rules: .venv/.installed ## promtool's tests of every rule and alert
	@scripts/stage.sh rules $(PY) -m pytest tests/promtool $(ARGS)

mutate-rules: .venv/.installed ## make every rule wrong in every small way: do the tests notice? ARGS='--component gpu'
	@$(PY) -m scripts.rules.mutate $(ARGS)

## ---- know the engine ----------------------------------------------------------------------------------------------
.PHONY: plan
plan: .venv/.installed ## where a card's memory goes: MODEL=llama3-8b-awq GPU=rtx4090, or PROFILE=llama3-8b-awq.rtx4090
	@$(PY) -m scripts.plan $(if $(MODEL),--model '$(MODEL)') $(if $(GPU),--gpu '$(GPU)') $(if $(PROFILE),--profile '$(PROFILE)') $(ARGS)

.PHONY: doctor verify
doctor: .venv/.installed ## look at host, Docker, card, model, settings and the running stack: ARGS='--for stack --json'
	@$(PY) -m scripts.doctor $(ARGS) || test $$? -eq 3

verify: .venv/.installed ## prove paged KV and prefix caching on a running engine: ENGINE=http://127.0.0.1:8000 ARGS='--log FILE'
	@$(PY) -m scripts.verify $(ENGINE) $(ARGS)

.PHONY: advise
advise: .venv/.installed ## what limits the stack now and what to try: PROMETHEUS=url, or the pages are scraped; ARGS='--json --window 600'
	@$(PY) -m scripts.advise $(if $(PROMETHEUS),--prometheus '$(PROMETHEUS)') $(ARGS) || [ $$? -eq 1 ] # 1: something limits, and it was said

.PHONY: engine-args
engine-args: install ## capture the pinned engine's flags, variables and metrics; VERSION=0.26.0 adds that release to the history
	$(PY) -m scripts.engine_args $(if $(VERSION),add $(VERSION),pinned)

.PHONY: flags flags-docs
flags: .venv/.installed ## the truth about a guide's flags: ARGS='vllm serve ... --flag', FILE=guide.txt, or piped; --lang zh answers in Chinese
	@$(PY) -m scripts.flags $(if $(FILE),--file '$(FILE)') $(ARGS) || [ $$? -eq 1 ] # 1: there is something to change, and it was said

flags-docs: .venv/.installed ## docs/flags.md and docs/flags.zh.md from the reviewed table
	$(PY) -m scripts.flags.table

## ---- quantize -----------------------------------------------------------------------------------------------------
.PHONY: quantize
quantize: .venv-quantize/.installed ## a model into a 4-bit checkpoint: CONFIG=configs/quantize/llama3-8b-instruct.yaml, ARGS='--dry-run'
	@.venv-quantize/bin/python -m scripts.quantize $(if $(CONFIG),--config '$(CONFIG)') $(ARGS)

.PHONY: gate promote revert models test-quantize
gate: .venv/.installed ## judge a quantized version against its original: NAME=llama3-8b-awq, DIGEST=... for one of several
	@$(PY) -m scripts.gate $(if $(NAME),'$(NAME)') $(DIGEST) $(ARGS)

promote: .venv/.installed ## serve a version that passed the gate, swapping a running engine under load: NAME=llama3-8b-awq
	@$(PY) -m scripts.promote $(if $(NAME),'$(NAME)') $(DIGEST) $(ARGS)

revert: .venv/.installed ## serve again what the last promotion replaced: NAME=llama3-8b-awq
	@$(PY) -m scripts.revert $(if $(NAME),'$(NAME)') $(ARGS)

models: .venv/.installed ## models and their versions: what is served, what was before, what the gate found
	@$(PY) -m scripts.models $(NAME) $(ARGS)

test-quantize: install model .venv-quantize/.installed ## quantize, gate, promote, serve, revert: a real model on the real engine
	@scripts/stage.sh quantize $(PY) -m pytest tests/quantize $(ARGS)

## ---- dashboards ---------------------------------------------------------------------------------------------------
.PHONY: dashboards dashboards-preview
dashboards: .venv/.installed ## grafana/dashboards/*.json from scripts/dashboards; ARGS=--check only says what is stale
	@$(PY) -m scripts.dashboards $(ARGS)

dashboards-preview: dashboards $(if $(PROMETHEUS),,model) ## pictures of them without Grafana: PROMETHEUS=http://127.0.0.1:9090, or a live stack here; OUT=folder
	@$(PY) -m scripts.dashboards.preview $(if $(PROMETHEUS),--prometheus '$(PROMETHEUS)') $(if $(OUT),--out '$(OUT)') $(ARGS)

## ---- tenants ------------------------------------------------------------------------------------------------------
.PHONY: keys usage settings-doc
keys: .venv/.installed ## API keys: NAME=app1 adds one and prints it once; ARGS='list', ARGS='rotate app1', ARGS='revoke app1'
	@$(PY) -m scripts.keys $(if $(NAME),add '$(NAME)') $(ARGS)

usage: .venv/.installed ## each tenant's usage as CSV: ARGS='--since 2030-01-01 --tenant app1'
	@$(PY) -m scripts.usage $(ARGS)

settings-doc: .venv/.installed ## write docs/settings.md from the settings' descriptions
	@$(PY) -m scripts.settings_doc $(ARGS)

## ---- observability, proven ----------------------------------------------------------------------------------------
.PHONY: prove-observability test-observability
prove-observability: model ## every query live, every alert raised by its fault and cleared (about 20 minutes); ARGS=--ci the quick part
	@$(PY) -m scripts.prove_observability $(ARGS)

test-observability: .venv/.installed ## the rules against every recorded engine release, by promtool
	@scripts/stage.sh observability $(PY) -m pytest tests/observability $(ARGS)

## ---- clients ------------------------------------------------------------------------------------------------------
.PHONY: test-conformance
test-conformance: model .venv-clients/.installed ## the official clients, a real Llama 3 tokenizer and the OpenAPI document against the gateway
	@scripts/stage.sh conformance .venv-clients/bin/python -m pytest tests/conformance $(ARGS)

## ---- several engines ----------------------------------------------------------------------------------------------
.PHONY: test-scale
test-scale: model ## three real engines behind one gateway: joined by file, drained, killed; who keeps the prefix cache; what a stop does to streams
	@scripts/stage.sh scale $(PY) -m pytest tests/engine_replicas $(ARGS)
