"""Lesson: benchmarking and comparing.

Run it with ``python docs/tutorials/benchmarking_and_comparing.py``. Everything it says is asserted.

A number that nobody can rerun is an anecdote. A run here leaves a *bundle*: a typed JSON file with the measurement,
every sample, the machine, the versions, the git state and how the run ended. Two sets of bundles give a verdict per
metric.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from headrace._cli import main
from headrace.bench import read_bundle
from headrace.bench._comparison import CompareCfg, compare
from headrace.bench._comparison_output import table

runs = Path(tempfile.mkdtemp())

# One measurement, as the command line makes it. It warms up until the step time is steady, and says so.

settings = ["cartpole", "--num-envs", "16", "--num-steps", "40", "--warmup-steps", "10"]
assert (
    main(["runtime", *settings, "--output", str(runs / "one"), "--formatter", "schema", "--formatter", "summary"]) == 0
)
bundle = read_bundle(runs / "one" / "runtime.json")
print(json.dumps(json.loads((runs / "one" / "runtime.json").read_text())["runtime"], indent=1)[:600], "…")
assert bundle.run.status == "completed"


def measured(name: str, *more: str) -> None:
    """One more run of a side, quietly."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["runtime", *settings, "--output", str(runs / name), *more]) == 0


# One run a side proves nothing: the verdict is always `inconclusive`. The unit of replication is a run, never a step.

measured("another")
another = read_bundle(runs / "another" / "runtime.json")
assert {row.verdict for row in compare([bundle], [another]).rows} <= {"inconclusive", None}

# So make several, in turns, so that what disturbs the machine disturbs both sides. Here B does ten times the
# physics of A. (`headrace sweep` does this for two commits, two settings or two libraries.)


for repeat in range(7):
    measured(f"a{repeat}", "--seed", str(repeat))
    measured(f"b{repeat}", "--seed", str(repeat), "--set", "decimation=20")
before = [read_bundle(runs / f"a{repeat}" / "runtime.json") for repeat in range(7)]
after = [read_bundle(runs / f"b{repeat}" / "runtime.json") for repeat in range(7)]

# Runs that differ in a setting are not compared unless told to: whoever compares apples with pears should say so.

comparison = compare(before, after, CompareCfg(allow=frozenset({"settings"}), metrics=("runtime.throughput_fps",)))
Console().print(table(comparison))
assert any(row.verdict == "regressed" for row in comparison.rows)

# A run compared with its like shows nothing, whatever the noise: a change counts only if it is significant *and* at
# least 5 %.

same = compare(before[:3], before[3:], CompareCfg(metrics=("runtime.throughput_fps",)))
assert not any(row.verdict == "regressed" for row in same.rows)
shutil.rmtree(runs)  # nothing is left behind
