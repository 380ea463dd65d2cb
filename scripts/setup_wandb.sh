#!/bin/sh
# Makes .venv-wandb: Weights & Biases with its own pins, before everything of .venv. Does nothing if it is up to date.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-wandb
if [ -f "$venv/.installed" ] && [ ! requirements-wandb.lock -nt "$venv/.installed" ]; then
  exit 0
fi
test -x "$venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --no-deps -r requirements-wandb.lock
.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/headrace_core.pth"
touch "$venv/.installed"
