"""The models of an installed ``gym-aloha``, found without importing it, with sensors for who touches whom."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from headrace.errors import DataError, MissingExtraError
from headrace.sim._mujoco_api import Model, load_model_with_contacts


def aloha_assets() -> Path:
    """The directory of gym-aloha's model files."""
    # importing it would import dm-control, which does not work with our version of MuJoCo
    found = find_spec("gym_aloha")
    if found is None or found.origin is None:
        raise MissingExtraError(
            "the ALOHA tasks need the model files of 'gym-aloha', which is not installed; run: "
            "pip install --no-deps gym-aloha (its dependencies ask for an older MuJoCo and are not needed)"
        )
    return Path(found.origin).parent / "assets"


def aloha_model(file: str, pairs: Sequence[tuple[str, str]]) -> Model:
    """Compile one of gym-aloha's models.

    Args:
        file: for example ``bimanual_viperx_transfer_cube.xml``.
        pairs: names of two geoms; sensor i, one number, counts the contacts between those of pair i.
    """
    path = aloha_assets() / file
    if not path.is_file():
        raise DataError(
            f"gym-aloha: expected the model {path}, got no such file; reinstall: pip install --no-deps gym-aloha"
        )
    return load_model_with_contacts(path, pairs)
