#!/bin/sh
# Starts Grafana as its image does, if the administrator's password is one. An empty variable would silently mean "admin".
set -eu
file=${GF_SECURITY_ADMIN_PASSWORD__FILE:-}
if [ ! -s "$file" ]; then
    echo "grafana: $file is missing or empty; expected the administrator's password in it (docs/operations.md)" >&2
    exit 1
fi
password=$(cat "$file")
if [ "${#password}" -lt 12 ]; then
    echo "grafana: the password in $file has ${#password} characters; expected at least 12" >&2
    exit 1
fi
exec "${GRAFANA_START:-/run.sh}" "$@"
