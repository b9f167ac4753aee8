# Debian's node exporter in the shape of the published image: its entrypoint and its port.
FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends prometheus-node-exporter wget \
    && rm -rf /var/lib/apt/lists/*
USER 65534:65534
ENTRYPOINT ["prometheus-node-exporter"]
