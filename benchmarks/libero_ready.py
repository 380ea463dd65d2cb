"""Time a task of LIBERO from its name to its first pictures, and weigh it; one line of JSON.

  python benchmarks/libero_ready.py libero_spatial/0 9

Processor seconds and seconds of ``headrace.make``, a reset without waits and both pictures of every environment, in a
new process after imports; bytes that are resident then.
"""

from __future__ import annotations

import json
import sys
import time

import psutil

import headrace


def main() -> None:
    """Make the environments once."""
    name, num_envs = sys.argv[1], int(sys.argv[2])
    begun, cpu = time.perf_counter(), time.process_time()
    env = headrace.make(name, num_envs, overrides={"waits": 0})
    env.reset()
    taken = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps({**taken, "bytes": psutil.Process().memory_info().rss}))
    env.close()


if __name__ == "__main__":
    main()
