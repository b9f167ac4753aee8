# The gateway: Python, its pinned packages and its source; nothing that builds or installs is left in it.
# Build from the repository's root: docker build -f docker/gateway.Dockerfile .

FROM python:3.11-slim-bookworm AS build
COPY docker/requirements/gateway.txt /requirements.txt
# Wheels only: a package without one would need a compiler here, and a build script of a stranger would run.
# The environment gets no pip of its own; the base's installs into it.
RUN python -m venv --without-pip /opt/venv \
    && python -m pip --python /opt/venv/bin/python install --no-cache-dir --disable-pip-version-check \
        --require-hashes --only-binary :all: -r /requirements.txt
COPY gateway /opt/app/gateway
# The root is read-only where this runs: what is not compiled now is compiled again at every start.
RUN /opt/venv/bin/python -m compileall -q /opt/app

FROM python:3.11-slim-bookworm
# A fixed number, so that owners of volumes and of files on the host can be set without asking the image.
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin gateway \
    && install -d -o gateway -g gateway -m 0750 /var/lib/gateway
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/app /opt/app
COPY configs/gateway.yaml /etc/gateway/gateway.yaml
COPY docker/gateway-healthcheck.py /opt/app/healthcheck.py
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GATEWAY_CONFIG=/etc/gateway/gateway.yaml \
    GATEWAY__LISTEN=0.0.0.0:8080 \
    GATEWAY__ADMIN_LISTEN=0.0.0.0:9000
WORKDIR /opt/app
USER 10001:10001
EXPOSE 8080 9000
# Its own loop, not the engine's state: a gateway without an engine still has to answer, with the reason.
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-I", "-S", "/opt/app/healthcheck.py"]
ENTRYPOINT ["python", "-m", "gateway"]
