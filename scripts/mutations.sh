#!/bin/bash
# Hunts the core's deliberate bugs and writes what came of it into docs/mutations.md, behind its
# introduction.
set -euo pipefail
cd "$(dirname "$0")/.."
table=$(mktemp)
trap 'rm -f "$table"' EXIT
cargo run --release --locked -p tidepool-sim --features mutations -- --mutations all --table docs/mutations.md > "$table"
document=docs/mutations.md
sed -i '/^| bug |/,$d' "$document"
cat "$table" >> "$document"
