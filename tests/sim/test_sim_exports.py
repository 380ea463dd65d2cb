"""What ``headrace.sim`` gives by name."""

from __future__ import annotations

import subprocess
import sys
from types import FunctionType

import pytest

import headrace.sim


def test_every_exported_name_is_there_and_the_list_is_sorted() -> None:
    assert headrace.sim.__all__ == sorted(headrace.sim.__all__)
    for name in headrace.sim.__all__:
        found = getattr(headrace.sim, name)
        # an alias of a type has no name of its own
        assert not isinstance(found, type | FunctionType) or found.__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Renderer'"):
        _ = headrace.sim.Renderer


def test_physics_does_not_load_the_ray_caster() -> None:
    program = "import sys, headrace.sim; print('headrace.sim.camera._render_stages' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
