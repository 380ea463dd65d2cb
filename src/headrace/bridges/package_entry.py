"""The file that ``child.py`` loads for a policy in another interpreter, and in worker processes: it brings headrace.

The interpreter needs Python 3.11 or newer, numpy and gymnasium, torch for a policy, and what the policy needs, but no
headrace; of the place where that is installed, nothing else becomes importable.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

_MODULES = {
    "PickledHost": "headrace.policies.foreign",
    "PolicyHost": "headrace.policies.foreign",
    "make_packed": "headrace.bridges.executors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_MODULES[name]), name)


def _bring_package() -> None:
    """Make the headrace that this file belongs to importable."""
    if sys.version_info < (3, 11):  # noqa: UP036  # of another interpreter than the one with headrace
        raise ImportError(f"headrace: expected Python 3.11 or newer, got {sys.version}; use another interpreter")
    here = Path(__file__).resolve().parent
    # put there to find this file; the modules beside it are none of the policy's
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != here]
    package = here.parent
    found = importlib.util.spec_from_file_location(
        "headrace", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["headrace"] = module
    found.loader.exec_module(module)


if __name__ == "headrace_entry":
    _bring_package()
