#!/bin/sh
# Makes .venv-libero: the genuine LIBERO with robosuite 1.4 and MuJoCo 3.3.2. Does nothing if it is up to date.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-libero
stamp="$venv/.installed"
if [ -f "$stamp" ] && [ ! examples/simulators/libero.lock -nt "$stamp" ]; then
  exit 0
fi
test -x "$venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet torch==2.13.0
"$venv/bin/python" -m pip install --quiet --no-deps -r examples/simulators/libero.lock
touch "$stamp"
