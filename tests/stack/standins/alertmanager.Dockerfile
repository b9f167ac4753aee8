# Debian's Alertmanager in the shape of the published image: its user, its directories, its entrypoint.
FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends prometheus-alertmanager wget \
    && rm -rf /var/lib/apt/lists/* && install -d -o 65534 -g 65534 /alertmanager
USER 65534:65534
ENTRYPOINT ["prometheus-alertmanager"]
