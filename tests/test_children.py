"""Whatever we start ends with us: one mechanism, and nothing that is started without it."""

from __future__ import annotations

import ast
import os
import select
import subprocess
import sys
from pathlib import Path

import headrace

SOURCE = Path(headrace.__file__).parent
PARENT = """
import multiprocessing, os, sys
from headrace._interrupts import Child, begin_child

STUCK = "import os, re; os.write(1, (str(os.getpid()) + chr(10)).encode()); re.match('(a+)+b', 40 * 'a')"

def work():
    begin_child()
    exec(STUCK)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=work, daemon=True).start()
    kept = [Child([sys.executable, "-c", STUCK])]
    # of a group of its own, with a child of its own
    started = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUCK!r}]); " + STUCK
    kept.append(Child([sys.executable, "-c", started], start_new_session=True))
    input()
"""


def test_children_that_are_stuck_in_a_call_end_with_their_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, tmp_path / "parent.py"],
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        children = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(4)]
        assert select.select(children, [], [], 0.2)[0] == []
        parent.kill()
    for child in children:
        assert select.select([child], [], [], 20)[0], "it outlived its parent"
        os.close(child)


def test_nothing_is_started_but_through_that_mechanism() -> None:
    """Short commands of git and the like aside, whose end is waited for."""
    started: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            name = ast.unparse(call.func)
            if name in ("os.fork", "os.system", "os.popen") or name.endswith((".Popen", "_exec")):
                started.setdefault(path.name, set()).add(name)
            if name == "subprocess.run":
                assert path.name in ("capture.py", "_sweep.py"), f"{path}: only for commands that end at once"
                assert "git" in ast.unparse(call) or path.name == "capture.py"
            if name.endswith(".Process") and name != "psutil.Process":
                (target,) = [ast.unparse(word.value) for word in call.keywords if word.arg == "target"]
                calls = [ast.unparse(line) for line in functions[target].body]
                assert "begin_child()" in calls[:2], f"{path}: {target} begins with begin_child()"
                started.setdefault(path.name, set()).add(target)
    assert {"collecting.py"} == started.keys()
