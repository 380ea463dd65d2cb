#!/bin/sh
# Makes .venv-aloha: the genuine gym-aloha with MuJoCo 3.8, and LeRobot's own evaluation loop around it. Does nothing if it is up to date.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-aloha
stamp="$venv/.installed"
if [ -f "$stamp" ] && [ ! requirements-lerobot.lock -nt "$stamp" ] && [ ! requirements-aloha.lock -nt "$stamp" ]; then
  exit 0
fi
test -x "$venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet torch==2.13.0
# MuJoCo 4 is ours: gym-aloha and dm-control need an older one
grep -v '^mujoco' requirements-lerobot.lock > "$venv/requirements-lerobot.txt"
"$venv/bin/python" -m pip install --quiet --no-deps -r "$venv/requirements-lerobot.txt" -r requirements-aloha.lock
touch "$stamp"
