#!/bin/sh
# Makes .venv-lerobot, in which LeRobot's own classes open our exports, and headrace plays its policies. Does nothing if it is up to date.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-lerobot
if [ -f "$venv/.installed" ] && [ ! requirements-lerobot.lock -nt "$venv/.installed" ]; then
  exit 0
fi
test -x "$venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet torch==2.13.0
"$venv/bin/python" -m pip install --quiet --no-deps -r requirements-lerobot.lock
touch "$venv/.installed"
