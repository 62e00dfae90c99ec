#!/usr/bin/env bash
# ./launch.sh quickstart             the main job on this machine, without a download; then a report
# ./launch.sh test                   format, lint, types and tests
# ./launch.sh SUBCOMMAND ARGS...     megatron-spd SUBCOMMAND ARGS...
#
# Makes the environment in .venv beside this file once, and again when pyproject.toml changes.
#
# SPD_PYTHON       the interpreter that makes .venv (default python3.11, else python3)
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
#                  several nodes: run the same line on each node; the program starts torchrun with
#                  them, and with --standalone when NNODES is unset or 1
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="$here/.venv"

find_python() {
    local name
    for name in "${SPD_PYTHON:-}" python3.11 python3; do
        if [[ -n "$name" ]] && command -v "$name" >/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "no Python found; set SPD_PYTHON to a Python 3.11" >&2
    return 2
}

make_environment() {
    local python digest stamp
    if [[ -n "${SPD_PYTHON:-}" ]] && ! command -v "$SPD_PYTHON" >/dev/null; then
        echo "SPD_PYTHON ($SPD_PYTHON) is not an interpreter" >&2
        return 2
    fi
    python="$(find_python)"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        echo "$python is not a Python 3.11; set SPD_PYTHON to one" >&2
        return 2
    fi
    digest="$("$python" -c 'import hashlib, sys
print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest()[:16])' "$here/pyproject.toml")"
    stamp="$venv/.spd-$digest"
    if [[ -e "$stamp" ]]; then
        return
    fi
    echo "making $venv (once)" >&2
    if [[ ! -x "$venv/bin/python" ]]; then
        "$python" -m venv --clear "$venv"
    fi
    rm -f "$venv"/.spd-*
    # torch first: building deepspeed's metadata looks for it
    "$venv/bin/python" -m pip install -qq torch==2.13.0 >&2
    "$venv/bin/python" -m pip install -qq -e "$here[dev]" >&2
    touch "$stamp"
}

# Two launches at once: the second waits here until the first has finished the environment.
exec 9>"$here/.venv.lock"
if command -v flock >/dev/null; then
    flock 9
fi
make_environment
exec 9>&-

export PATH="$venv/bin:$PATH"

if [[ "${1:-}" == "test" ]]; then
    shift
    cd "$here"
    ruff format --check .
    ruff check .
    mypy megatron_spd
    exec pytest -q "$@"
fi
exec megatron-spd "$@"
