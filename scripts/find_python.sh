#!/usr/bin/env bash
# Prints a Python that meshcee runs on: $PYTHON if set, else python3, else the newest python3.x that works.
set -euo pipefail
for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    # Asked, not looked up: a version manager's shim may exist and refuse to run.
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        command -v "$python"
        exit 0
    fi
done
echo "meshcee needs Python 3.11 or newer with the venv module; install one (Debian: python3 python3-venv)," \
    "or name it: make PYTHON=/path/to/python3.11" >&2
exit 2
