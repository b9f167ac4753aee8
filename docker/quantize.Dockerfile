# The quantization job: both producers at their own pins, apart from the engine's (docs/quantize.md).
# Build from the repository's root: docker build -f docker/quantize.Dockerfile .
#
# `--target base` is everything but the packages. A folder with a torch wheel of the wanted version, for a machine that
# reaches no index with one, is given as --build-context wheels=DIR.

FROM scratch AS wheels

FROM python:3.11-slim-bookworm AS base
# torch asks for OpenMP. Not pinned: Debian keeps only a suite's newest build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10004 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin quantize
# The root is read-only where this runs. What is downloaded stays in MODELS_DIR, the one place that is writable and large.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_CACHE_DIR=off \
    MODELS_DIR=/models \
    XDG_CACHE_HOME=/models/.cache \
    HF_HOME=/models/.cache/huggingface
WORKDIR /opt/app
COPY scripts /opt/app/scripts
COPY configs/gpus.yaml /opt/app/configs/gpus.yaml
USER 10004:10004
ENTRYPOINT ["python", "-m", "scripts.quantize"]

FROM base AS quantize
USER 0:0
COPY docker/requirements/quantize.txt /requirements.txt
# torch is a step of its own, as in scripts/quantize_install.sh: each of its builds has its own hash. The index's build runs
# on a card and without one.
ARG TORCH=2.13.0
# autoawq comes as source, built by the setuptools that the lock pins.
RUN --mount=type=bind,from=wheels,target=/wheels \
    python -m venv /opt/venv \
    && sed -n '/^setuptools==/,/# via/p' /requirements.txt > /tmp/builder.txt \
    && pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes -r /tmp/builder.txt \
    && pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation --require-hashes \
        -r /requirements.txt \
    && pip install --no-cache-dir --disable-pip-version-check --no-warn-conflicts --find-links /wheels "torch==$TORCH" \
    && rm /tmp/builder.txt
# Both producers on one small layer: what does not fit together fails the build, not the first user.
RUN python -m scripts.quantize --self-check
USER 10004:10004
