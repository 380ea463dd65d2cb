"""The settings that every kernel shares."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

from headrace._kernels import compiled as cache

PACKAGE = Path(cache.__file__).parent.parent
CAMERA = PACKAGE / "sim" / "camera"

PROGRAM = """
import torch
torch.set_num_threads(1)
from headrace.history import normalize_image
normalize_image(torch.zeros((64, 64, 64, 3), dtype=torch.uint8))
print(torch.get_num_threads())
"""


def test_kernels_leave_torchs_number_of_threads_alone() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "HEADRACE_NUM_THREADS": "2"},
    )
    assert run.stdout.split() == ["1"], run.stderr


def test_code_on_disk_belongs_to_a_kernel_and_to_the_kernels_that_it_calls() -> None:
    names = {path.name for path in cache.sources(CAMERA / "_render_stages.py")}
    assert {"_render_stages.py", "_render_place.py", "_render_texture.py"} <= names, "two imports away too"
    assert "_render_scene.py" in names, "constants are compiled in"
    assert "compiled.py" not in names
    held = cache.sources(PACKAGE / "envs" / "_observations.py")
    assert PACKAGE / "history" / "_normalize.py" in held, "kernels outside of the folder, too"


def test_every_file_has_the_imports_that_its_syntax_tree_has() -> None:
    for path in PACKAGE.rglob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace"):
                names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        names -= {"headrace._kernels.compiled"}
        files = {PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in names if "." in name}
        missing = {file for file in files if file.is_file()} - set(cache._imports(path))
        assert not missing, path


def test_an_edit_of_a_called_kernel_changes_the_place_and_restoring_it_brings_it_back(tmp_path) -> None:
    copy = tmp_path / "headrace"
    shutil.copytree(PACKAGE, copy)
    stages, gather = Path("sim/camera/_render_stages.py"), Path("replay/row_space.py")
    before = cache.digest(copy / stages)
    assert before == cache.digest(PACKAGE / stages), "the same content at another place: after reinstalling"
    texture = copy / "sim" / "camera" / "_render_texture.py"
    content = texture.read_bytes()
    texture.write_bytes(content + b"# changed\n")
    assert cache.digest(copy / stages) != before
    assert cache.digest(copy / gather) == cache.digest(PACKAGE / gather), "those that do not call it stay"
    texture.write_bytes(content)
    assert cache.digest(copy / stages) == before


def test_a_kernel_that_moves_within_the_package_is_compiled_again(tmp_path) -> None:
    old, new = (tmp_path / "headrace" / folder / "row_space.py" for folder in ("_kernels", "replay"))
    for path in (old, new):
        path.parent.mkdir(parents=True)
        shutil.copy(PACKAGE / "replay" / "row_space.py", path)
    assert cache.digest(old) != cache.digest(new), "compiled code names its module"


COMPILES = """
import logging, sys, time
logging.getLogger("headrace.kernels").setLevel(sys.argv[1])
from headrace._kernels import compiled
compiled._PATIENCE_S = float(sys.argv[2])
handler = logging.StreamHandler(sys.stdout)
logging.getLogger("headrace.kernels").addHandler(handler)
import torch
from headrace.learning import gae
gae(*[torch.ones(3, 4)] * 3, *[torch.ones(3, 4) > 2] * 2, gamma=0.9, lam=0.9)
"""


def _compile(tmp_path: Path, level: str, patience: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILES, level, patience],
        capture_output=True,
        text=True,
        check=True,
        env=environment | {"XDG_CACHE_HOME": str(tmp_path)},
    )
    return run.stdout


def test_kernels_lie_in_the_users_cache_directory_and_the_second_process_compiles_nothing(tmp_path) -> None:
    said = _compile(tmp_path, "INFO", "100")
    assert "compiling headrace.learning._returns_numba._lambda_returns" in said
    assert "first use on this machine" not in said, "a short one is not worth a warning"
    assert any((tmp_path / "headrace" / "kernels").glob("_returns_numba-*/*.nbi"))
    assert _compile(tmp_path, "INFO", "100") == ""


def test_long_compilation_warns_once_says_why_and_can_be_silenced(tmp_path) -> None:
    said = _compile(tmp_path / "a", "WARNING", "0.001")
    assert said.count("compiling kernels for their first use on this machine") == 1
    assert "_lambda_returns" in said
    assert str(tmp_path / "a" / "headrace" / "kernels") in said
    assert _compile(tmp_path / "c", "ERROR", "0.001") == ""
