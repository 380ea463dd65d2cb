#!/bin/sh
# Makes .venv-lerobot, in which LeRobot's own classes open our exports, and headrace plays its policies; with the argument
# "newest" .venv-lerobot-newest, with the newest release, on Python 3.12. Does nothing if it is up to date.
set -eu
cd "$(dirname "$0")/.."
kind=${1:+-$1}
case "$kind" in
"") python=${PYTHON:-python3.11} torch=2.13.0 ;;
-newest) python=${PYTHON312:-python3.12} torch=2.11.0 ;;
*) echo "setup_lerobot.sh: expected no argument, or newest, got $1" >&2 && exit 2 ;;
esac
venv=.venv-lerobot$kind lock=requirements-lerobot$kind.lock
if [ -f "$venv/.installed" ] && [ ! "$lock" -nt "$venv/.installed" ]; then
  exit 0
fi
test -x "$venv/bin/python" || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "torch==$torch"
"$venv/bin/python" -m pip install --quiet --no-deps -r "$lock"
touch "$venv/.installed"
