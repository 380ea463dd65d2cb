"""The settings that every kernel shares."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from headrace._kernels import compiled, gather, render_paint

PROGRAM = """
import torch
torch.set_num_threads(1)
from headrace.vision import normalize_image
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


def test_code_on_disk_belongs_to_a_kernel_and_to_the_kernels_that_it_calls(monkeypatch, tmp_path) -> None:
    here = Path(compiled.__file__).parent
    names = {path.name for path in compiled.sources(here / "render_paint.py")}
    assert {"render_paint.py", "render_wrap.py", "render_texture.py", "render_scene.py"} <= names, (
        "two imports away too"
    )
    assert compiled.sources(here / "gather.py") == [here / "gather.py"]
    # what numba compares before it takes code from disk
    stamp = render_paint.paint._cache._cache_file._source_stamp
    for name in names:
        (tmp_path / name).write_bytes((here / name).read_bytes())
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    compiled._digest.cache_clear()
    assert compiled._digest(tmp_path / "render_paint.py") == stamp
    compiled._digest.cache_clear()
    with (tmp_path / "render_texture.py").open("a") as file:
        file.write("# changed\n")
    assert compiled._digest(tmp_path / "render_paint.py") not in (stamp, None)
    compiled._digest.cache_clear()
    assert gather._scatter._cache._cache_file._source_stamp != stamp
