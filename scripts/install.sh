#!/usr/bin/env bash
# Makes .venv, or brings it up to date: `scripts/install.sh STAMP`. Make calls it when the stamp is missing or old.
#
# The idea: the stamp is removed first and written last, and a .venv without it is thrown away, so an installation
# that was interrupted is never mistaken for a finished one.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=${1:-.venv/.installed}
python=$(scripts/find_python.sh)

if [ ! -e "$stamp" ]; then rm -rf .venv; fi
rm -f "$stamp"
echo "Installing into .venv with $("$python" --version); a minute or two, most of it torch ..." >&2
[ -d .venv ] || "$python" -m venv .venv
# torch first and alone: where an index or a folder offers a build for the CPU only, this request takes it, and what is
# installed later is satisfied with it.
.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch==2.13.0
.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,docs,examples,log]'
touch "$stamp"
echo "Installed." >&2
