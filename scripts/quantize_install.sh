#!/usr/bin/env bash
# Makes the quantization job's virtual environment: scripts/quantize_install.sh PYTHON VENV
# Exit 0: it is there. 1: it is not; the last line says why. Run again to go on.
set -euo pipefail
python=$1 venv=$2
torch=2.13.0 # the engine's
lock=docker/requirements/quantize.txt

"$python" -m venv "$venv"
step() { scripts/step.sh "$1" "$venv/install.log" "${@:2}"; }
pip=("$venv/bin/pip" install --quiet --disable-pip-version-check --no-input)

echo "Installing the quantization job (1.4 GB on disk; 6 GB where torch comes from the index):"
# autoawq comes as source. What builds it is pinned like the rest, so it is there before and not fetched aside.
builder=$(mktemp)
trap 'rm -f "$builder"' EXIT
sed -n '/^setuptools==/,/# via/p' "$lock" >"$builder"
step "what builds autoawq" "${pip[@]}" --no-deps --require-hashes -r "$builder"
step "autoawq, llm-compressor and what they need" \
    "${pip[@]}" --no-deps --no-build-isolation --require-hashes -r "$lock"
# The CPU build comes from a find-links folder where pip has one configured; elsewhere the same pin takes the index's
# larger build, which also runs on a card. Two builds, two hashes: so no lock.
step "torch $torch" "${pip[@]}" --no-warn-conflicts "torch==$torch"
step "a first import" "$venv/bin/python" -W ignore -c 'import awq, llmcompressor'
