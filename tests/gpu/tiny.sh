#!/usr/bin/env bash
# On a machine with a GPU: the tiny recipe with that machine's own torch, twice, compared. Nothing may assume a CPU.
#
#   tests/gpu/tiny.sh PYTHON OUT        PYTHON: one with torch, transformers, trl 1.14, accelerate, datasets
#
# Needs tests/gpu/tiny-cuda.lock.json (kitbuild lock tests/gpu/tiny-cuda.yaml, on any machine) and kitbuild's own
# dependencies. The environment is recorded, not locked, and every verdict says so.
set -euo pipefail
python=$1
out=$2
kitbuild=${KITBUILD:-kitbuild}
cd "$(dirname "$0")/../.."

first=$($kitbuild run tests/gpu/tiny-cuda.yaml --engine local --python "$python" --out "$out" --json) || { echo "$first" >&2; exit 1; }
second=$($kitbuild run tests/gpu/tiny-cuda.yaml --engine local --python "$python" --out "$out" --json) || { echo "$second" >&2; exit 1; }
run_dir() { "$python" -c 'import json, sys; print(json.loads(sys.argv[1])["run_dir"])' "$1"; }
a=$(run_dir "$first")
b=$(run_dir "$second")
$kitbuild archive show "$a"
"$python" - "$a" <<'PYTHON'
import json, sys

manifest = json.load(open(f"{sys.argv[1]}/manifest.json"))
assert manifest["device"]["kind"] == "cuda", manifest["device"]
assert manifest["environment"]["locked"] is False
print(json.dumps({key: manifest[key] for key in ("device", "driver", "results", "launch", "attention")}, indent=1))
PYTHON
$kitbuild compare "$a" "$b"
