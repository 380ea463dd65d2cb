"""Preflight: what a policy states about its inputs and actions, compared with what an environment gives, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace.errors import ConfigError, HeadraceError, PolicyError
from headrace.files import read_record
from headrace.policies.engines import EnginePolicy
from headrace.policies.observation_map import MappedPolicy, ObservationMap
from headrace.policies.protocol import ChunkPolicy, unwrap_policy
from headrace.types import Obs

if TYPE_CHECKING:
    from rich.table import Table

ACTION = "action"
"""The key of :attr:`StatesFeatures.feature_specs` under which a policy states its action."""
_MOST_CHANNELS = 4
_MARGIN = 0.1
"""Share of a range by which the mean of training data may lie outside: targets of controllers overshoot."""
Verdict = Literal["same", "mapped", "converted", "not stated", "not read", "warned", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpec:
    """What a policy states about one input, or about its action."""

    groups: tuple[str, ...] = ()
    """Observation groups, of which the first that is there is read; empty for the one with the key's own name."""
    shape: tuple[int, ...] | None = None
    """Of one row and one step, after the conversion; None where the policy does not state it."""
    dtype: str | None = None
    """Such as ``float32``; None for any."""
    convert: Literal["flat", "picture", "floats"] | None = None
    """What the policy does first: ``flat`` joins all axes of a row, ``picture`` takes channels first or last,
    ``floats`` puts channels first and makes float32 from 0 to 1 of bytes."""
    mean: tuple[float, ...] | None = None
    """Of the training data, which the policy normalizes by; one number per number of a row, or per channel."""

    def read(self, key: str, obs: Obs) -> Tensor:
        """Return what the policy receives under a key, (n, …); PolicyError where the group is not what it states."""
        group = self.source(key, obs)
        if group not in obs:
            raise PolicyError(
                f"policy: it reads {key!r}, expected a group {group!r} of the environment, got {sorted(obs)}; name the "
                f"groups with PlayCfg(mapping=ObservationMap(keys={{{key!r}: …}})) (--map)"
            )
        rows = obs[group]
        if self.convert == "floats" and rows.dim() >= 3:
            last, given = rows.movedim(-1, -3), tuple(rows.shape[-3:])
            if rows.shape[-1] <= _MOST_CHANNELS < rows.shape[-3] or tuple(last.shape[-3:]) == self.shape != given:
                rows = last
            rows = rows.to(torch.float32) / 255 if rows.dtype == torch.uint8 else rows
        elif self.convert == "flat":
            rows = rows.flatten(1)
        shape = self.shape or ()
        given = tuple(rows.shape[-len(shape) :]) if shape else ()
        layouts = [given, given[-1:] + given[:-1], given[1:] + given[:1]] if self.convert == "picture" else [given]
        if shape not in layouts:
            raise PolicyError(
                f"policy: it reads {key!r} of shape {shape}, got {given} from the group {group!r}; make the task "
                "draw that size, or map it: ObservationMap(keys=…, image_size=…) (--map, --resize)"
            )
        if self.dtype is not None and rows.dtype != getattr(torch, self.dtype, None):
            raise PolicyError(
                f"policy: expected {key!r} of dtype {self.dtype}, got {str(rows.dtype).removeprefix('torch.')} from "
                f"the group {group!r}; map it: ObservationMap(keys=…, dtypes={{{key!r}: {self.dtype!r}}})"
            )
        return rows

    def source(self, key: str, obs: Mapping[str, object]) -> str:
        """Return the group that is read under a key; the last possible one where none is there."""
        names = self.groups or (key,)
        return next((name for name in names if name in obs), names[-1])

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set, in the form of JSON."""
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {name: value for name, value in given.items() if value not in (None, [])}

    @classmethod
    def from_json(cls, data: object) -> FeatureSpec:
        """Read what :meth:`to_json` gave; DataError for anything else."""
        return read_record(cls, data, "features")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRow:
    """One line of the table."""

    name: str
    """The policy's key, a group that it does not read, ``cameras``, ``action`` or ``chunk``."""
    policy: str
    """What the policy states; "" for nothing."""
    environment: str
    """What the environment gives, after the map."""
    verdict: Verdict
    note: str = ""
    """What is wrong, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A policy compared with an environment, before the first episode."""

    rows: tuple[PreflightRow, ...]

    @property
    def refused(self) -> tuple[PreflightRow, ...]:
        """The lines that do not fit together."""
        return tuple(row for row in self.rows if row.verdict == "refused")

    def check(self) -> None:
        """Raise a ConfigError with all lines that do not fit together."""
        if self.refused:
            raise ConfigError("preflight: " + "\n".join(row.note for row in self.refused))

    def table(self) -> Table:
        """Return the lines as a table to print."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        colors = {"refused": "red", "warned": "yellow", "not stated": "dim", "not read": "dim"}
        table = Table(title="preflight", title_justify="left", box=box.SIMPLE)
        for name in ("", "policy", "environment", ""):
            table.add_column(name, overflow="fold")
        for row in self.rows:
            verdict = row.verdict if not row.note else f"{row.verdict}: {row.note}"
            table.add_row(*map(escape, (row.name, row.policy, row.environment, verdict)), style=colors.get(row.verdict))
        return table


def read_features(policy: object) -> dict[str, FeatureSpec]:
    """Return what a policy states about its inputs and its action; empty for one that states nothing."""
    own = unwrap_policy(policy)
    own = unwrap_policy(own.policy) if isinstance(own, MappedPolicy) else own
    stated = own.engine if isinstance(own, EnginePolicy) else own
    return dict(cast("Mapping[str, FeatureSpec]", getattr(stated, "feature_specs", None) or {}))


def compare_features(
    policy: ChunkPolicy, env: object, chunk: PreflightRow, mapping: ObservationMap | None = None
) -> Preflight:
    """Compare what a policy states with what an environment gives.

    Args:
        policy: what is read and planned: its ``feature_specs``, key → :class:`FeatureSpec`, where it has them.
        env: with ``single_action_space``, and ``single_observation_space`` where it states one.
        chunk: the line about the lengths of chunks.
        mapping: of a server's policy, where its engine does not have it.
    """
    own = unwrap_policy(policy)
    mapping = cast("ObservationMap | None", getattr(getattr(own, "engine", own), "mapping", None)) or mapping
    specs = read_features(policy)
    inputs = {key: spec for key, spec in specs.items() if key != ACTION}
    space = getattr(env, "single_observation_space", None)
    if not isinstance(space, spaces.Dict):  # an environment of the user's own, which states none
        return Preflight(rows=(_compare_action(policy, None, env, mapping), chunk))
    given, refused = _map_rows(_make_zero_rows(space, policy.obs_steps), mapping)
    rows = [] if refused is None else [refused]
    keys = inputs or dict.fromkeys(given, FeatureSpec())
    for key, spec in keys.items() if refused is None else ():
        rows.append(_compare(key, spec, given, mapping, space) if inputs else _make_unstated(key, given, mapping))
    sources = {spec.source(key, given) for key, spec in keys.items()}
    used = sources if mapping is None or not mapping.keys else {part for key in sources for part in mapping.groups(key)}
    rows += [
        PreflightRow(name=name, policy="", environment=_describe_space(space[name]), verdict="not read")
        for name in space.spaces
        if name not in used and refused is None
    ]
    cameras = [key for key, spec in inputs.items() if spec.convert in ("picture", "floats")]
    if len(cameras) > 1:
        read = [inputs[key].source(key, given) for key in cameras]
        read = read if mapping is None or not mapping.keys else [" + ".join(mapping.groups(key)) for key in read]
        order = PreflightRow(name="cameras", policy=", ".join(cameras), environment=", ".join(read), verdict="same")
        rows.append(order)
    return Preflight(rows=(*rows, _compare_action(policy, specs.get(ACTION), env, mapping), chunk))


def _make_zero_rows(space: spaces.Dict, obs_steps: int) -> Obs:
    shape = (1,) if obs_steps == 1 else (1, obs_steps)
    return {name: torch.from_numpy(np.zeros((*shape, *(part.shape or ())), part.dtype)) for name, part in space.items()}


def _map_rows(rows: Obs, mapping: ObservationMap | None) -> tuple[Obs, PreflightRow | None]:
    """Return the keys that the policy sees, or the line that refuses the map."""
    if mapping is None or not mapping.keys:
        return rows, None
    try:
        return {key: torch.from_numpy(np.ascontiguousarray(part)) for key, part in mapping.fill(rows).items()}, None
    except ConfigError as error:
        text = ", ".join(mapping.keys)
        return {}, PreflightRow(name="mapping", policy=text, environment="", verdict="refused", note=str(error).strip())


def _compare(
    key: str, spec: FeatureSpec, given: Obs, mapping: ObservationMap | None, space: spaces.Dict
) -> PreflightRow:
    group = spec.source(key, given)
    mapped = mapping is not None and group in mapping.keys
    dtype = spec.dtype or ("float32" if spec.convert == "floats" else "")
    parts = (dtype, "" if spec.shape is None else str(spec.shape), "" if spec.mean is None else "normalized")
    stated = " ".join(filter(None, parts))
    source = mapping.keys[group] if mapping is not None and mapped else group
    got = _describe_rows(given[group]) if group in given else "none"
    got += "" if mapped or group not in space.spaces else _bounds(space[group])
    row = PreflightRow(name=key, policy=stated, environment=f"{source}: {got}", verdict="mapped" if mapped else "same")
    try:
        read = spec.read(key, given)
    except HeadraceError as error:
        return replace(row, verdict="refused", note=str(error).strip())
    if not mapped and (spec.convert is not None and _describe_rows(read) != got.partition(" in ")[0]):
        row = replace(row, verdict="converted", note=_describe_rows(read))
    low, high = (0.0, 1.0) if spec.convert == "floats" else _limits(space[group]) if not mapped else (-np.inf, np.inf)
    return _check_mean(row, spec, low, high)


def _make_unstated(key: str, given: Obs, mapping: ObservationMap | None) -> PreflightRow:
    source = key if mapping is None or key not in mapping.keys else mapping.keys[key]
    verdict: Verdict = "not stated" if mapping is None or not mapping.keys else "mapped"
    return PreflightRow(name=key, policy="", environment=f"{source}: {_describe_rows(given[key])}", verdict=verdict)


def _compare_action(
    policy: ChunkPolicy, spec: FeatureSpec | None, env: object, mapping: ObservationMap | None
) -> PreflightRow:
    space = cast("spaces.Space[Any]", getattr(env, "single_action_space"))  # noqa: B009  # every environment has it
    size = int(np.prod(space.shape or (1,)))
    row = PreflightRow(
        name=ACTION,
        policy=f"({policy.action_dim},)" + ("" if spec is None or spec.mean is None else " normalized"),
        environment=_describe_space(space),
        verdict="mapped" if mapping is not None and mapping.negated else "same",
    )
    if policy.action_dim != size:
        return replace(row, verdict="refused", note=f"policy: expected actions of size {size}, got {policy.action_dim}")
    signs = np.ones(size)
    if mapping is not None and mapping.negated:
        signs[list(mapping.negated)] = -1
    return row if spec is None else _check_mean(row, spec, *_limits(space), signs=signs)


def _check_mean(row: PreflightRow, spec: FeatureSpec, low: Any, high: Any, signs: Any = 1.0) -> PreflightRow:
    """Warn where the mean of the training data lies outside of what can be: other units, or another range."""
    if spec.mean is None:
        return row
    mean, margin = np.array(spec.mean) * signs, _MARGIN * (np.asarray(high) - low)
    try:
        outside = np.count_nonzero((mean < low - margin) | (mean > high + margin))
    except ValueError:
        text = f"policy: statistics of {row.name!r} have {len(spec.mean)} numbers, which do not fit {row.environment}"
        return replace(row, verdict="refused", note=text)
    if not outside:
        return row
    text = f"the mean of the training data lies outside of the range in {outside} of {len(spec.mean)} numbers"
    return replace(row, verdict="warned", note=text + ": other units?")


def _describe_rows(rows: Tensor) -> str:
    return f"{str(rows.dtype).removeprefix('torch.')} {tuple(rows.shape[1:])}"


def _describe_space(space: spaces.Space[Any]) -> str:
    return f"{space.dtype} {tuple(space.shape or ())}" + _bounds(space)


def _limits(space: spaces.Space[Any]) -> tuple[Any, Any]:
    """Return the bounds of every number of a row, flat; infinite where the space has none."""
    if isinstance(space, spaces.Box):
        return space.low.reshape(-1), space.high.reshape(-1)
    return -np.inf, np.inf


def _bounds(space: spaces.Space[Any]) -> str:
    if not isinstance(space, spaces.Box):
        return f" {type(space).__name__}"
    low, high = float(space.low.min()), float(space.high.max())
    return "" if np.isinf(low) and np.isinf(high) else f" in [{low:g}, {high:g}]"
