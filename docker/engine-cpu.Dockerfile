# The engine for a machine without a GPU: the same vLLM version as the published CUDA image, its CPU build, from a lock.
# Build from the repository's root: docker build -f docker/engine-cpu.Dockerfile .
#
# Two stages, so that `--target base` is everything but the 3 GB of Python packages.

FROM python:3.11-slim-bookworm AS base
# g++ compiles kernels where a profile turns torch.compile on; vLLM asks for libnuma, torch for OpenMP. Not pinned: Debian
# keeps only a suite's newest build of each, and a pin on an older one would fail.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10002 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin engine
USER 10002:10002
EXPOSE 8000

FROM base AS engine
USER 0:0
COPY docker/requirements/engine-cpu.txt /requirements.txt
COPY docker/vllm-alias /vllm-alias
# torch is a step of its own, as in scripts/engine_install.sh: its CPU build has another name and hash on every index.
# The CPU index is asked first for it; PyPI's build of the same pin runs as well, and is larger.
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
        --only-binary :all: -r /requirements.txt \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-warn-conflicts \
        --extra-index-url "$TORCH_INDEX" "torch==$TORCH" \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation /vllm-alias \
    && /opt/venv/bin/vllm --version
ENV PATH=/opt/venv/bin:$PATH
USER 10002:10002
