"""What a dataset says about itself: ``dataset.json``, from which exports and replay know the environment."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from headrace.errors import ConfigError, DataError
from headrace.files import read_json
from headrace.recording._episode_file import TEXT, Kinds, check_record, is_number, is_text
from headrace.types import StackSpec

INFO = "dataset.json"
FORMAT = "headrace-dataset"
VERSIONS = (1, 2)
"""That can be read; the last is written. In version 1 the journal has hashes of whole files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """Where the episodes of a dataset come from. Exports and replay read it; ``DatasetInfo.of(env)`` fills it in."""

    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the environment is, as ``EnvRecipe.from_json`` reads it: ``source``, and what else decides an episode."""
    fps: float | None = None
    """Environment steps per simulated second; LeRobot needs it."""
    instruction: str = ""
    """The task in words, where the episodes have none of their own; the name of the task where empty."""
    robot_type: str | None = None
    stacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Image groups that are stacks of frames: the arguments of ``StackSpec`` by observation path."""
    spaces: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """``action`` and ``observation`` as JSON, in the form that Minari writes Gymnasium spaces."""

    @classmethod
    def of(cls, env: Any, *, instruction: str = "", robot_type: str | None = None) -> DatasetInfo:
        """Describe an environment of ``headrace.make`` or ``headrace.bridge``: its recipe, rate, spaces and stacks."""
        recipe, task = getattr(env, "recipe", None), getattr(env, "task", None)
        images = cast("Mapping[str, Any]", getattr(task, "images", {}))
        return cls(
            recipe={} if recipe is None else recipe.identity(),
            fps=None if task is None else round(1 / task.dt, 6),
            instruction=instruction,
            robot_type=robot_type,
            stacks={f"obs/{name}": asdict(image.stack) for name, image in images.items() if image.frames > 1},
            spaces={
                "action": space_json(env.single_action_space),
                "observation": space_json(env.single_observation_space),
            },
        )

    @property
    def source(self) -> str:
        """Task name, as ``headrace.make`` takes it, or ``gym:ID`` of a bridged environment; empty where not said."""
        return str(self.recipe.get("source", ""))

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ``headrace.make``, beside the task's name: whatever else the recipe says."""
        return {name: value for name, value in self.recipe.items() if name != "source"}

    def stack(self, name: str) -> StackSpec | None:
        """Return how the frames of an image group are stacked; None for single images."""
        known = self.stacks.get(name)
        return None if known is None else StackSpec(**known)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


_TEXT = (TEXT, is_text)
_OBJECT = ("a JSON object", _is_object)
_KINDS: Kinds = {
    "recipe": _OBJECT,
    "fps": ("a number above 0 or null", lambda value: value is None or (is_number(value) and 0 < value < math.inf)),
    "instruction": _TEXT,
    "robot_type": ("a text or null", lambda value: value is None or is_text(value)),
    "stacks": _OBJECT,
    "spaces": _OBJECT,
}


def info_text(info: DatasetInfo) -> str:
    """Return the content of ``dataset.json``; what could not be read back is refused."""
    said = asdict(info)
    try:
        check_record(json.loads(json.dumps(said)), _KINDS, "DatasetInfo")
    except (DataError, TypeError, ValueError) as error:
        raise ConfigError(f"{error}; describe the environment in what JSON can say") from error
    return json.dumps({"format": FORMAT, "version": VERSIONS[-1], **said}, indent=1) + "\n"


def read_info(path: Path) -> DatasetInfo:
    """Return the ``dataset.json`` of a dataset."""
    file = path / INFO
    if not file.exists():
        raise DataError(f"{path}: no {INFO}; expected the directory that EpisodeRecorder wrote")
    content = read_json(file)
    if content.pop("format", None) != FORMAT or content.pop("version", None) not in VERSIONS:
        raise DataError(f"{file}: expected format {FORMAT} of version {VERSIONS}; update headrace")
    info = DatasetInfo(**check_record(content, _KINDS, str(file)))
    try:
        for name in info.stacks:
            info.stack(name)
    except (TypeError, ConfigError) as error:
        raise DataError(f"{file}: stacks: {error}; the file is damaged") from error
    return info


def space_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a Gymnasium space as Minari writes it."""
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "subspaces": {name: space_json(part) for name, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "subspaces": [space_json(part) for part in cast("Sequence[Any]", space.spaces)]}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "dtype": str(space.dtype), "start": int(space.start), "n": int(space.n)}
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = np.asarray(space.nvec), np.asarray(space.start)
        return {"type": "MultiDiscrete", "dtype": str(space.dtype), "nvec": nvec.tolist(), "start": start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        shape = list(space.shape)
        return {"type": "MultiBinary", "n": shape if len(shape) > 1 else shape[0]}
    if isinstance(space, spaces.Text):
        return {
            "type": "Text",
            "max_length": space.max_length,
            "min_length": space.min_length,
            "charset": "".join(sorted(space.character_set)),
        }
    if isinstance(space, spaces.Box):
        bounds = {"low": _bounds(np.asarray(space.low)), "high": _bounds(np.asarray(space.high))}
        return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
    raise ConfigError(
        f"spaces: expected one that Minari knows, got {type(space).__name__}; record without DatasetInfo.of"
    )


def _bounds(values: NDArray[Any]) -> Any:
    """Bounds as JSON can say them: one number where all are the same, infinities as texts."""
    flat = [number if math.isfinite(number) else str(number) for number in values.reshape(-1).tolist()]
    return flat[0] if len(set(flat)) == 1 else np.array(flat, object).reshape(values.shape).tolist()


def whole_space(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return a space of ``dataset.json`` with every bound spelled out, as Minari reads it."""
    if space["type"] == "Dict":
        return {"type": "Dict", "subspaces": {name: whole_space(part) for name, part in space["subspaces"].items()}}
    if space["type"] == "Tuple":
        return {"type": "Tuple", "subspaces": [whole_space(part) for part in space["subspaces"]]}
    if space["type"] != "Box":
        return dict(space)
    shape, dtype = tuple(space["shape"]), np.dtype(space["dtype"])
    bounds = {name: np.broadcast_to(np.array(space[name], dtype), shape).tolist() for name in ("low", "high")}
    return {**space, **bounds}
