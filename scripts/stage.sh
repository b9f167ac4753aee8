#!/usr/bin/env bash
# Runs a command as a named stage and says how long it took: scripts/stage.sh NAME COMMAND...
# Exit code: the command's.
set -uo pipefail
name=$1
shift
printf '=== %s\n' "$name"
since=$SECONDS
"$@"
code=$?
printf '=== %s: %s in %d s\n' "$name" "$([ $code -eq 0 ] && echo passed || echo "failed (exit code $code)")" $((SECONDS - since))
exit $code
