#!/bin/sh
# Makes the environments in which the genuine readers open our exports: .venv-lerobot, .venv-minari, .venv-robomimic.
# Does nothing for those that are up to date.
set -eu
cd "$(dirname "$0")/.."
scripts/setup_lerobot.sh
for name in minari robomimic; do
  venv=.venv-$name
  lock=requirements-$name.lock
  if [ -f "$venv/.installed" ] && [ ! "$lock" -nt "$venv/.installed" ]; then
    continue
  fi
  test -x "$venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$venv"
  if [ "$name" = robomimic ]; then
    "$venv/bin/python" -m pip install --quiet torch==2.13.0
  fi
  "$venv/bin/python" -m pip install --quiet --no-deps -r "$lock"
  touch "$venv/.installed"
done
