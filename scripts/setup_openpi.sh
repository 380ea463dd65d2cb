#!/bin/sh
# Makes .venv-openpi, in which openpi's own client runs: it needs numpy 1. Does nothing if it is up to date.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-openpi
if [ -f "$venv/.installed" ] && [ ! requirements-openpi.lock -nt "$venv/.installed" ]; then
  exit 0
fi
test -x "$venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --no-deps -r requirements-openpi.lock
touch "$venv/.installed"
