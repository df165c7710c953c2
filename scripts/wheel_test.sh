#!/usr/bin/env bash
# Builds the wheel, looks into it, installs it into an empty environment, and runs the smoke tests against it.
#
# The idea: the tests run in a folder that holds tests/, what they try of benchmarks/, and no package, so a file that the wheel
# forgot cannot be found by accident. Called by `make wheel`, after the environment in .venv exists.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "Building the wheel ..."
.venv/bin/python -m build --wheel --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
wheel=$(echo "$work"/dist/*.whl)
.venv/bin/check-wheel-contents "$wheel"

echo "Installing $(basename "$wheel") into an empty environment ..."
"$(scripts/find_python.sh)" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$checkout/constraints.txt" "$@"; }
pip torch==2.13.0
pip "$wheel" pytest pytest-asyncio pytest-timeout hypothesis

mkdir "$work/run"
cp -r tests benchmarks pyproject.toml "$work/run/"
cd "$work/run"
# `python -m pytest` so that tests can import their helpers from `tests`.
env -u PYTHONPATH MESHCEE_WHEEL_TEST=1 "$work/venv/bin/python" -m pytest -q -m smoke -p no:cacheprovider $(grep -rl --include='*.py' "mark\.smoke" tests)
