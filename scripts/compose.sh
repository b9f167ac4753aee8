#!/usr/bin/env bash
# compose.sh ps|logs|shell-engine [ARGUMENTS]: Docker Compose on all of the stack, or one line that says why not.
set -euo pipefail
cd "$(dirname "$0")/.."

refuse() {
  echo "$1: $2" >&2
  exit 1
}

command=${1:?what shall Compose do?}
command -v docker > /dev/null || refuse "$command" "docker is not installed: docs.docker.com/engine/install"
docker compose version > /dev/null 2>&1 || refuse "$command" "docker has no Compose here: docs.docker.com/compose/install"
[[ $command == shell-engine ]] || exec docker compose --profile '*' "$@"
engine=$(docker compose --profile '*' ps --services --status running | grep -m1 '^engine') || refuse "$command" "no engine runs: make up (make up-cpu)"
exec docker compose exec "$engine" bash
