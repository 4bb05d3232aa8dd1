#!/bin/bash
# Runs every test of the workspace. The last line is `N passed, N failed`, over all test programs; the exit status is 0 only if
# nothing failed. Arguments go to cargo test: scripts/test.sh --package tidepool-engine
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

log=$(mktemp)
trap 'rm -f "$log"' EXIT

[ $# -gt 0 ] || set -- --workspace
# The same profile as the program that users run, so that everything is compiled once and what is tested is what is shipped.
# cargo builds the program before it runs the first test, and the tests with real parts find it next to themselves.
cargo test --release --no-fail-fast "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}

read -r passed failed < <(awk '/^test result:/ { passed += $4; failed += $6 } END { print passed + 0, failed + 0 }' "$log")
# What did not compile, or ended without a result, failed too.
if [ "$status" -ne 0 ] && [ "$failed" -eq 0 ]; then failed=1; fi
if [ "$failed" -gt 0 ]; then
    printf '\nfailed:\n'
    sed -n 's/^test \(.*\) \.\.\. FAILED$/    \1/p; s/^error: \(.*\)$/    \1/p' "$log" | sort -u
fi
printf '%s passed, %s failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
