#!/bin/sh
# Makes the environments of foreign simulators from their lock files. Does nothing for those that are up to date.
# mjlab, robosuite and the benchmarks (MetaWorld, PushT) live in interpreters of their own.
set -eu
cd "$(dirname "$0")/.."
for name in ${*:-robosuite mjlab benchmarks}; do
  venv=.venv-$name
  if [ -f "$venv/.installed" ] && [ ! "examples/simulators/$name.lock" -nt "$venv/.installed" ]; then
    continue
  fi
  test -x "$venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --no-deps -r "examples/simulators/$name.lock"
  touch "$venv/.installed"
done
