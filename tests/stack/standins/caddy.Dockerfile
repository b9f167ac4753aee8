# Debian's Caddy in the shape of the published image: its entrypoint's arguments, and the mark on its program.
FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends caddy libcap2-bin wget && rm -rf /var/lib/apt/lists/* \
    && setcap cap_net_bind_service=+ep /usr/bin/caddy
CMD ["caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"]
