"""The one door to MuJoCo's untyped bindings: models, the native batch and the log, with types. They load on use."""

from __future__ import annotations

import functools
import importlib
import os
import weakref
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from headrace._interrupts import delay_signals
from headrace.errors import ConfigError, LifecycleError, MissingExtraError, UnknownNameError

_LEAST = 4
_STILL_WORKS = "bridges, evaluation, replay, learning, vision and bench work without it"


@functools.cache
def _library(name: str = "mujoco") -> Any:
    try:
        with delay_signals():  # a signal inside would become an ImportError of its bindings
            found = importlib.import_module("mujoco")
    except ModuleNotFoundError as error:
        if error.name != "mujoco":
            raise
        raise MissingExtraError(
            f"native tasks need MuJoCo {_LEAST}, which is not installed; run: pip install 'mujoco>={_LEAST}'. "
            f"{_STILL_WORKS.capitalize()}"
        ) from error
    version = str(found.__version__)
    if int(version.split(".")[0]) < _LEAST:
        raise MissingExtraError(
            f"native tasks need MuJoCo {_LEAST}, and {version} is installed; run: pip install 'mujoco>={_LEAST}', in "
            f"an environment of its own if something else needs {version}. {_STILL_WORKS.capitalize()}"
        )
    return found if name == "mujoco" else importlib.import_module(name)


class _Native:
    """MuJoCo's bindings, imported and their version checked when the first of their names is read."""

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = getattr(_library(), name)
        return found


# the bindings are compiled and carry no types: everything that leaves this module has some
mujoco: Any = _Native()

# MjData fields that are part of the state: writable views of the batch's rows
STATE_FIELDS = frozenset(
    (
        *("time", "qpos", "qvel", "act", "history", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied"),
        *("eq_active", "mocap_pos", "mocap_quat", "userdata", "plugin_state", "plastic"),
    )
)


@functools.cache
def setconst_inputs() -> frozenset[str]:
    """Model fields from which MuJoCo derives constants: writing one calls for set_const."""
    return frozenset(mujoco.MjModel._setconst_inputs)


def simulation_error() -> type[Exception]:
    """Return what a batch raises for simulations that failed."""
    return _library("mujoco.batch").SimulationError


class Model(Protocol):
    """``mujoco.MjModel``, whose bindings carry no types."""

    nq: int
    nv: int
    nu: int
    nbody: int
    ngeom: int
    ncam: int
    qpos0: NDArray[np.float64]

    def __getattr__(self, name: str, /) -> Any: ...


class NativeBatch(Protocol):
    """What headrace uses of ``mujoco.batch.Batch``."""

    model: Model
    state: NDArray[np.float64]
    warning: NDArray[np.int32]

    def bind(self, name: str) -> NDArray[Any]: ...
    def expand(self, name: str) -> NDArray[Any]: ...
    def step(self, ids: NDArray[np.int32] | None = None, nstep: int = 1, stage: int = 0) -> None: ...
    def forward(self, ids: NDArray[np.int32] | None = None, stage: int = ...) -> None: ...
    def set_const(self, ids: NDArray[np.int32] | None = None) -> None: ...


def new_batch(model: Model, num_envs: int, threads: int, *, persistent: bool = False) -> NativeBatch:
    """Make a batch: one state row per simulation, scratch memory per thread, or per simulation if ``persistent``.

    In a forked child a batch with threads has lost them: calling it would wait forever, so it raises instead.
    """
    batch = _library("mujoco.batch").Batch(model, nsim=num_envs, nthread=threads, persistent=persistent)
    if threads > 1:
        _with_threads.add(batch)
    return cast("NativeBatch", batch)


@functools.cache
def _make_forked_batch() -> type:
    """Return what a batch with threads becomes in a forked child: its rows can be read, its threads are gone."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise LifecycleError(
            "simulation: this process was forked after the simulation was made, and a fork leaves its threads behind; "
            "make the environment in the child, pass threads=1 to make(), or start the process with 'spawn'"
        )

    refused: dict[str, Any] = {"step": refuse, "forward": refuse, "set_const": refuse, "ray": refuse}
    return type("_ForkedBatch", (_library("mujoco.batch").Batch,), refused)


_with_threads: weakref.WeakSet[Any] = weakref.WeakSet()
_left_by_parent: list[Any] = []
"""In a forked child: never freed, since freeing a batch waits for its threads."""


def _disown_batches() -> None:
    for batch in tuple(_with_threads):
        batch.__class__ = _make_forked_batch()
        _left_by_parent.append(batch)
    _with_threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_batches)


def failed_ids(error: Exception) -> NDArray[np.int64]:
    """Return the simulations that a ``SimulationError`` is about, int64 (m,)."""
    return np.asarray(cast("Any", error).ids, dtype=np.int64)


def load_model(source: Path | str, *, cameras: Mapping[str, Mapping[str, Any]] | None = None) -> Model:
    """Compile MJCF, given as text or as the path of a file, or URDF by its path.

    ``cameras`` are added: name → body, position, quaternion and fovy.
    """
    text = isinstance(source, str) and source.lstrip().startswith("<")
    if not text and not Path(source).is_file():
        raise ConfigError(f"model: expected MJCF text or the path of an MJCF file, got {str(source)!r}: no such file")
    if not cameras:
        load = mujoco.MjModel.from_xml_string if text else mujoco.MjModel.from_xml_path
        return cast("Model", load(str(source)))
    spec = mujoco.MjSpec.from_string(source) if text else mujoco.MjSpec.from_file(str(source))
    try:
        for name, camera in cameras.items():
            body = spec.body(camera["body"])
            if body is None:
                known = [each.name for each in spec.bodies]
                raise UnknownNameError(f"body of the camera {name!r}:", camera["body"], known)
            body.add_camera(name=name, pos=camera["position"], quat=camera["quaternion"], fovy=camera["fovy"])
        return cast("Model", spec.compile())
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cameras: {', '.join(cameras)} cannot be added: {error}") from error


def gymnasium_model(name: str, *, camera: str | None = None) -> Model:
    """Compile one of the models in Gymnasium's assets, for example ``ant.xml``.

    Args:
        name: the file.
        camera: a ``<camera>`` element for a model that has none; cameras do not touch the physics.
    """
    mjcf = files("gymnasium.envs.mujoco").joinpath("assets", name).read_text()
    if camera is not None:
        mjcf = mjcf.replace("<worldbody>", f"<worldbody>{camera}", 1)
    return load_model(mjcf)


def load_model_with_contacts(path: Path, pairs: Sequence[tuple[str, str]]) -> Model:
    """Compile an MJCF file with a sensor for each of ``pairs``, after its own.

    Such a sensor is one number: how many contacts there are between two geoms. It follows from positions alone.
    """
    spec = mujoco.MjSpec.from_file(str(path))
    geom = mujoco.mjtObj.mjOBJ_GEOM
    for first, second in pairs:
        spec.add_sensor(
            name=f"{first} touches {second}",
            type=mujoco.mjtSensor.mjSENS_CONTACT,
            objtype=geom,
            objname=first,
            reftype=geom,
            refname=second,
            # found (1 << 0), no reduction, one slot: its number is that of all contacts that match
            intprm=[1, 0, 1],
        )
    return cast("Model", spec.compile())


def bad_state_counts(batch: NativeBatch) -> NDArray[np.int32]:
    """Return a live view (num_envs, kinds) of how often each simulation went bad since its last reset."""
    # the warnings after which MuJoCo resets a simulation by itself (bad qpos, qvel, qacc) or drops its controls
    kinds = mujoco.mjtWarning
    return batch.warning[:, int(kinds.mjWARN_BADQPOS) : int(kinds.mjWARN_BADCTRL) + 1, 1]


def silence_log() -> None:
    """Keep MuJoCo from writing MUJOCO_LOG.TXT and from printing: headrace reports bad simulations itself."""
    config = mujoco.MjLogConfig.get()
    config.logto_file = False
    config.logto_console = False
    mujoco.MjLogConfig.set(config)


Kind = Literal["body", "joint", "geom", "site", "camera", "actuator", "light", "material", "texture"]

# MuJoCo's joint types in order: free, ball, slide, hinge
_POSITIONS = (7, 4, 1, 1)
_VELOCITIES = (6, 3, 1, 1)


def object_id(model: Model, kind: Kind, name: str) -> int:
    """Return the index of a named object; an unknown name raises an error that lists the model's names."""
    try:
        return getattr(model, kind)(name).id
    except KeyError as error:
        raise ConfigError(
            f"{kind} {name!r}: expected one of the model's, got none of that name; {error.args[0]}"
        ) from error


# terms ask for the same few columns in every step; a model in use is alive anyway, and a dropped one is soon pushed out
@functools.lru_cache(maxsize=256)
def position_columns(model: Model, joints: tuple[str, ...]) -> tuple[int, ...]:
    """Return the columns of ``qpos`` that belong to the joints, in their order.

    One for a hinge or slide, 7 for a free one.
    """
    return _columns(model, joints, "jnt_qposadr", _POSITIONS)


@functools.lru_cache(maxsize=256)
def velocity_columns(model: Model, joints: tuple[str, ...]) -> tuple[int, ...]:
    """Return the columns of ``qvel`` (and of every ``dof_`` field) that belong to the joints, in their order."""
    return _columns(model, joints, "jnt_dofadr", _VELOCITIES)


def _columns(model: Model, joints: tuple[str, ...], address: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    columns: list[int] = []
    for joint in (object_id(model, "joint", name) for name in joints):
        first = int(getattr(model, address)[joint])
        columns.extend(range(first, first + sizes[int(model.jnt_type[joint])]))
    return tuple(columns)
