#!/usr/bin/env bash
# scripts/quickstart from a fresh clone with a store of its own: cold, then again. Prints and keeps both times.
#
#   benchmarks/quickstart.sh [RESULT.json] [--tiny]
#
# Cold: an empty store, no environment, and none of kitbuild's images in the engine (they are removed first).
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
result=${1:-/dev/stdout}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone --quiet "$checkout" "$work/clone"
export KITBUILD_HOME=$work/store
docker images --quiet --filter 'reference=kitbuild/*' 2>/dev/null | sort -u | xargs -r docker rmi -f >/dev/null 2>&1 || true

timed() {
    local began ended
    began=$(date +%s%N)
    (cd "$work/clone" && scripts/quickstart "${@:2}") >"$work/$1.out"
    ended=$(date +%s%N)
    tail -n 1 "$work/$1.out" | grep -q '^IDENTICAL' || { cat "$work/$1.out" >&2; exit 1; }
    awk -v a="$began" -v b="$ended" 'BEGIN { printf "%.1f", (b - a) / 1e9 }'
}
cold=$(timed cold "${@:2}")
warm=$(timed warm "${@:2}")
parts() { awk '/ s$/ && NF >= 3 && $NF == "s" { s = $(NF-1); $NF = ""; $(NF-1) = ""; sub(/ +$/, ""); printf "%s\"%s\": %s", sep, $0, s; sep = ", " }' "$work/$1.out"; }
facts=$(cd "$checkout/benchmarks" && python3 -c 'import json, machine; print(json.dumps(machine.machine()))')
printf '{"machine": %s,\n "cold_seconds": %s, "warm_seconds": %s,\n "cold": {%s},\n "warm": {%s}}\n' \
    "$facts" "$cold" "$warm" "$(parts cold)" "$(parts warm)" >"$result"
