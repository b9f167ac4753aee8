#!/usr/bin/env bash
# One step of an installation: scripts/step.sh WHAT LOG COMMAND...
# Prints WHAT and its seconds. Where the command fails: one line with the cause, exit 1, and all it said in LOG.
set -euo pipefail
what=$1 log=$2
shift 2
since=$SECONDS
printf '  %s ... ' "$what"
if "$@" >"$log" 2>&1; then
    printf '%d s\n' $((SECONDS - since))
    exit 0
fi
printf 'failed\n'
# pip closes with "no matching distribution" also when it reached no index: the network's own words come before.
if grep -q 'No space left on device' "$log"; then
    why='no space left on the disk'
elif why=$(grep -m1 'connection broken by' "$log" | grep -oE '\[Errno -?[0-9]+\] [A-Za-z ]+|timed out'); then
    why="the package index can't be reached ($(printf %s "$why" | head -n 1))"
else
    why=$(grep -v '^ *$' "$log" | tail -n 1) || why=''
fi
echo "$what: ${why:-it said nothing}. Run the same command again to go on; more in $log" >&2
exit 1
