#!/usr/bin/env bash
# Tries the newest transformers, peft, accelerate, datasets, trl and torchdata that pip finds, beside this project's torch:
# `scripts/newest.sh [FOLDER]`, or `make newest ARGS=FOLDER`. Exit code 1 where an example or a test fails.
#
# The idea: constraints.txt holds what tests see every day, and a user's `pip install 'meshcee[sft,data]'` brings what is newest that
# day. So an environment is made as a user makes one. A folder that is given is kept, and brought up to date the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -gt 0 ]; then venv=$1; else
    venv=$(mktemp -d)
    trap 'rm -rf "$venv"' EXIT
fi
python=$(scripts/find_python.sh)
[ -e "$venv/bin/python" ] || "$python" -m venv "$venv"
torch=$(grep '^torch==' constraints.txt)

pip() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check --upgrade "$@"; }
echo "Installing into $venv ..." >&2
pip "$torch"  # alone: scripts/install.sh says why
# Loggers and a notebook's kernel are in no extra: users have their own, and these are large.
pip "$torch" --upgrade-strategy eager -e '.[dev,examples,sft,data,log]' wandb mlflow trackio nbclient ipykernel
"$venv/bin/python" scripts/newest.py
