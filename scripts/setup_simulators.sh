#!/bin/sh
# Makes the environments of foreign simulators from their lock files. Does nothing for those that are up to date.
# mjlab and robosuite live in interpreters of their own; Playground and EnvPool (batched) run in headrace's process.
set -eu
cd "$(dirname "$0")/.."
for name in ${*:-robosuite mjlab batched}; do
  venv=.venv-$name
  if [ -f "$venv/.installed" ] && [ ! "requirements-$name.lock" -nt "$venv/.installed" ]; then
    continue
  fi
  test -x "$venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --no-deps -r "requirements-$name.lock"
  touch "$venv/.installed"
done
