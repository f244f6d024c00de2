#!/usr/bin/env bash
# What is too long for every push. Each line can be run alone; the full product of clients takes about an hour on two cores.
# PYTHON: which python (python3). MINUTES: how long the fuzzer draws (20).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

python=${PYTHON:-python3}
failed=()
check() {
    local name=$1
    shift
    echo "== $name: $*"
    "$@" || failed+=("$name")
}
# All tests, those marked `nightly` too, with full products where a push runs rows in which every pair meets (tests/helpers/pairwise.py).
check tests env MFSDP_NIGHTLY=1 "$python" -m pytest tests -q --no-header --timeout 1200 -n 2 --dist loadfile --no-loadscope-reorder
check fuzzer "$python" tests/fuzz.py --minutes "${MINUTES:-20}"
# The same 2,000 cases every night: about half an hour.
check corpus "$python" tests/fuzz.py --replay tests/data/corpus-2026-11-27.jsonl.xz
check clients env CLIENTS=all "$python" -m pytest tests/clients -q --no-header
# The bounds of pyproject.toml, installed and run.
check versions bash .ci/matrix

if ((${#failed[@]})); then
    echo "FAILED: ${failed[*]}" >&2
    exit 1
fi
echo "all nightly checks passed"
