# The quantization job: both producers at their own pins, apart from the engine's (docs/quantize.md).
# Build from the repository's root: docker build -f docker/quantize.Dockerfile .
#
# `--target base` is everything but the 6 GB of packages. A folder with a wheel of the wanted torch (a CPU build, say) is
# given as --build-context wheels=DIR; without one it comes from the index.

FROM scratch AS wheels

FROM python:3.11-slim-bookworm AS system
# torch asks for OpenMP. Not pinned: Debian keeps only a suite's newest build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10004 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin quantize

FROM system AS packages
COPY docker/requirements/quantize.txt /requirements.txt
# torch is a step of its own, as in scripts/quantize_install.sh: each of its builds has its own hash. The index's build runs
# on a card and without one. autoawq comes as source, built by the setuptools that the lock pins.
ARG TORCH=2.13.0
RUN --mount=type=bind,from=wheels,target=/wheels \
    python -m venv /opt/venv \
    && sed -n '/^setuptools==/,/# via/p' /requirements.txt > /builder.txt \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes -r /builder.txt \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation \
        --require-hashes -r /requirements.txt \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-warn-conflicts --find-links /wheels \
        "torch==$TORCH"

FROM system AS base
# The root is read-only where this runs. What is downloaded stays in MODELS_DIR, the one place that is writable and large.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MODELS_DIR=/models \
    XDG_CACHE_HOME=/models/.cache \
    HF_HOME=/models/.cache/huggingface
COPY scripts /opt/app/scripts
COPY configs/gpus.yaml /opt/app/configs/gpus.yaml
WORKDIR /opt/app
USER 10004:10004
ENTRYPOINT ["python", "-m", "scripts.quantize"]

FROM base AS quantize
COPY --from=packages /opt/venv /opt/venv
# Both producers on one small layer: what does not fit together fails the build, not the first user.
RUN HOME=/tmp USER=quantize python -m scripts.quantize --self-check
