"""Lesson: benchmarking and comparing.

Run it with ``python docs/tutorials/benchmarking_and_comparing.py``. Everything it says is asserted.

A number that cannot be measured again proves little. A run leaves a *bundle*: a typed JSON file with the measurement,
every sample, the machine, the versions, the git state and how the run ended. Two sets of bundles give a verdict per
metric.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

import headrace

runs = Path(tempfile.mkdtemp())

# One measurement. It warms up until the step time is steady, and says whether that was reached.

settings = {"num_envs": 16, "num_steps": 40, "warmup_steps": 10}
one = headrace.bench.runtime(
    "cartpole", run=headrace.RunCfg(output=runs / "one", formatters=("schema", "summary")), **settings
)
print(json.dumps(json.loads((runs / "one" / "runtime.json").read_text())["runtime"], indent=1)[:600], "…")
assert one.bundle.run.status == "completed"

# One run per side says nothing about times: the verdict is always `inconclusive`, and it says what to run instead. The
# unit is a run, never a step.

another = headrace.bench.runtime("cartpole", run=headrace.RunCfg(output=runs / "another"), **settings)
(comparison,) = headrace.compare(one.bundle, another.bundle).comparisons
assert {row.verdict for row in comparison.rows} <= {"inconclusive", None}

# So make several, in turns: what disturbs the machine then disturbs both sides. Here B does ten times the physics of A.
# (`headrace sweep` does this for two commits, two settings or two libraries. It draws at random which side comes first,
# and only then are times judged without `accept_drift`.)

for repeat in range(7):
    order = ("a", "b") if repeat % 2 == 0 else ("b", "a")
    for side in order:
        more = {"decimation": 20} if side == "b" else {}
        headrace.bench.runtime(
            "cartpole", seed=repeat, overrides=more, run=headrace.RunCfg(output=runs / side / str(repeat)), **settings
        )

# Runs that differ in a setting are not compared unless the setting is allowed to differ.

rule = headrace.bench.CompareCfg(metrics=["runtime.total_fps"], accept_drift=True, allow=["settings"])
result = headrace.compare(runs / "a", runs / "b", rule=rule)
(comparison,) = result.comparisons
Console().print(comparison)
assert result.regressed
assert comparison.rows[0].test == "relabeling, 7 and 7 runs"

# Runs compared with their like show nothing, whatever the noise.

first, second = ([runs / "a" / str(i) for i in range(7) if i % 2 == side] for side in (0, 1))
assert not headrace.compare(first, second, rule=rule).regressed

# All of it on one page that needs no network:

page = headrace.bench.report(runs / "a", runs / "b", output=runs / "report.html", rule=rule)
assert page.runs == 14
shutil.rmtree(runs)  # nothing is left behind
