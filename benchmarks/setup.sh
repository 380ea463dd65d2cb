#!/bin/sh
# Makes the environments that the benchmarks compare with, from their locks. Run again at will: what is there is kept.
set -eu
cd "$(dirname "$0")/.."

make_environment() { # name, lock
    [ -x "$1/bin/python" ] || python3.11 -m venv "$1"
    # torch first: the other packages would pull a CUDA build
    "$1/bin/pip" install -q "$(grep '^torch==' "$2" | sed 's/+.*//')"
    "$1/bin/pip" install -q -r "$2"
    "$1/bin/pip" install -q --no-deps --no-build-isolation -e .
}

make_environment .venv-bench benchmarks/requirements-peers.lock

# EnvPool brings neither torch nor headrace: it is measured in a process of its own
[ -x .venv-envpool/bin/python ] || python3.11 -m venv .venv-envpool
.venv-envpool/bin/pip install -q -r benchmarks/requirements-envpool.lock

# mujoco-warp and Newton, for the cameras: neither torch nor headrace
[ -x .venv-bench-sim/bin/python ] || python3.11 -m venv .venv-bench-sim
.venv-bench-sim/bin/pip install -q -r benchmarks/requirements-sim.lock

# robots made of meshes, for benchmarks/vision_robots.py: only their MJCF files are used, so without dependencies
for environment in .venv-bench .venv-bench-sim; do
    "$environment/bin/pip" install -q --no-deps gym-aloha metaworld
done

# models of other packages, for scripts/compare_pictures.py: only their files are used, so without dependencies
[ -x .venv-models/bin/python ] || python3.11 -m venv .venv-models
.venv-models/bin/pip install -q --no-deps dm_control==1.0.50 robosuite==1.5.2 metaworld==3.1.1 gymnasium-robotics==1.4.2
