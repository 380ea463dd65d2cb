"""Checks of parts: learners, which every adapter of an RL library must pass, policies, cameras, and a GPU."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs.recipe import AnyEnv
from headrace.errors import HeadraceError
from headrace.evaluation.cfg import PlayCfg
from headrace.evaluation.player import open_player
from headrace.libraries.learner import Learner
from headrace.libraries.training import CheckpointMeta
from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera.camera import FREE, CameraFrames, PoseReader, refuse_kinds
from headrace.sim.camera.names import make_camera
from headrace.sim.mujoco_api import Model, mujoco
from headrace.testing._contract import CheckResult
from headrace.types import Obs, ResetRecord, StepRecord

if TYPE_CHECKING:
    from headrace.envs.recipe import SimName
    from headrace.policies.load_policy import PolicySource


def check_learner(
    make_env: Callable[[], AnyEnv],
    make_learner: Callable[[AnyEnv], Learner],
    meta: CheckpointMeta,
    folder: Path,
    *,
    suffix: str,
    reads: Collection[str] | None = None,
) -> list[CheckResult]:
    """Run every check on a learner; the first broken claim raises an AssertionError that says which.

    Args:
        make_env: a new environment, the same each time.
        make_learner: a new learner over it, the same each time: it seeds the random streams it uses.
        meta: passed to ``save``.
        folder: for checkpoints.
        suffix: of its checkpoint files.
        reads: the observation groups that its policy reads, and no others; None for all but ``critic``.
    """
    path = folder / f"checkpoint{suffix}"
    env = make_env()
    count = _Count()
    env.attach(count)
    learner = make_learner(env)
    _check_times(learner)
    learner.iterate()
    _check_episodes(learner, count)
    learner.save(path, meta)
    begun, obs = learner.state_dict(), env.observe()
    actions = learner.policy()(obs).clone()
    learner.load_state_dict(begun)
    learner.iterate()
    after = learner.policy()(obs).clone()
    _check_actions(actions, env)
    _check_groups(learner, obs, {name for name in obs if name != "critic"} if reads is None else reads)
    learner.close()
    env.close()
    assert not torch.equal(actions, after), "iterate: expected learning to change the policy, got the same actions"

    other_env = make_env()
    other = make_learner(other_env)
    assert not torch.equal(actions, other.policy()(obs)), "a new learner: expected other actions than a trained one"
    other.load(path)
    assert torch.equal(actions, other.policy()(obs)), "load: expected the saved policy's actions, bit for bit"
    other.load_state_dict(begun)
    other.iterate()
    resumed = other.policy()(obs)
    assert torch.equal(after, resumed), (
        "load + load_state_dict: expected resumed training to equal training without a break, "
        f"got actions that differ by up to {float((after - resumed).abs().max()):.3g}"
    )
    other.close()
    other_env.close()
    names = (
        *("time_split", "episodes_counted", "actions_in_bounds", "observation_groups_read"),
        *("checkpoint_round_trip", "resumes_exactly"),
    )
    return [CheckResult(check=name) for name in names]


def _check_times(learner: Learner) -> None:
    begin = time.perf_counter()
    collect, learn = learner.iterate()
    wall = time.perf_counter() - begin
    assert collect > 0.0, f"iterate: expected a collection time, got {collect}"
    assert learn > 0.0, f"iterate: expected a learning time, got {learn}"
    # libraries that read time.time() see steps of the system's clock
    assert collect + learn <= wall + 0.01, f"iterate: {collect} s + {learn} s are more than the wall time, {wall} s"


def _check_episodes(learner: Learner, count: _Count) -> None:
    found = learner.finished()
    columns = (found.env_ids, found.lengths, found.returns)
    said = list(zip(*(column.tolist() for column in columns), strict=True))
    assert said, "finished: expected episodes to end in two iterations; use an environment with short ones"
    # rewards are float32 here and added up as float64 in the environment: about seven digits
    same = len(said) == len(count.ended) and all(
        mine[:2] == given[:2] and math.isclose(mine[2], given[2], rel_tol=1e-5, abs_tol=1e-5)
        for given, mine in zip(said, count.ended, strict=True)
    )
    assert same, f"finished: expected (slot, length, return) {count.ended}, got {said}"
    again = learner.finished()
    assert not len(again), f"finished: expected each episode once, got {len(again)} a second time"


def _check_groups(learner: Learner, obs: Obs, reads: Collection[str]) -> None:
    """Turn each group upside down: the actions change if the policy reads it, and not otherwise."""
    before = learner.policy()(obs).clone()
    for name, rows in obs.items():
        turned = {**obs, name: 255 - rows if rows.dtype == torch.uint8 else 1 - rows}
        changed = not torch.equal(before, learner.policy()(turned))
        if name in reads:
            assert changed, f"observation group {name!r}: expected the policy to read it, got the same actions without"
        else:
            assert not changed, (
                f"observation group {name!r}: expected that the policy does not read it, got that it does"
            )


def _check_actions(actions: Tensor, env: AnyEnv) -> None:
    space = env.single_action_space
    assert actions.shape == (env.num_envs, *(space.shape or ())), f"policy: got actions of shape {actions.shape}"
    assert not actions.requires_grad, "policy: expected actions without gradients"
    assert all(space.contains(row.numpy()) for row in actions.cpu()), "policy: expected actions within the bounds"


class _Count:
    """Counts episodes by hand: rewards of each environment added up until a flag says that its episode ended."""

    needs = frozenset[Literal["states", "frames"]]()

    def __init__(self) -> None:
        self.ended: list[tuple[int, int, float]] = []
        self._running: dict[int, tuple[int, float]] = {}

    def after_reset(self, record: ResetRecord) -> None:
        pass

    def after_step(self, record: StepRecord) -> None:
        ended = record.step.terminated | record.step.truncated
        for slot in record.env_ids.tolist():
            steps, total = self._running.get(slot, (0, 0.0))
            steps, total = steps + 1, total + float(record.step.reward[slot])
            self._running[slot] = (steps, total)
            if bool(ended[slot]):
                self.ended.append((slot, steps, total))
                del self._running[slot]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheck:
    """What a check of a policy found."""

    verified: int
    """Rows that were answered again alone and in another batch, with equal bits; 0 where that was not possible."""
    strict_size: int | None
    """Rows of its strict batches; None for a server whose answers depend on the batch."""
    rows_per_row: float
    """Rows that were computed per row that was needed."""


def check_policy(policy: PolicySource, env: AnyEnv, *, steps: int = 20, play: PlayCfg = PlayCfg()) -> PolicyCheck:
    """Play some steps of a policy and verify its answers as a strict evaluation does, before a long one.

    Args:
        policy: as for :func:`headrace.evaluate`.
        env: to play in, made with ``autoreset="disabled"``; it is reset.
        steps: of the batch.
        play: how the policy is played.

    Raises:
        PolicyError: an answer depends on the batch, on earlier calls, or on a global random generator.
    """
    from headrace.evaluation.scheduling import EndlessPlan

    with torch.no_grad(), open_player(env, policy, play, env.seed) as player:
        found = player.play(EndlessPlan(env.num_envs), most_steps=steps)
    return PolicyCheck(
        verified=found.counters.rows_verified, strict_size=found.strict_size, rows_per_row=found.rows_per_row
    )


_KINDS = ("rgb", "depth", "segmentation")
_NEAR = 8
"""Of 255: the largest difference of colors that counts as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraCheck:
    """How the native pictures of one camera differ from MuJoCo's, both without antialiasing and shadows."""

    camera: str
    segmentation: float
    """Share of pixels that show another geom, edges aside."""
    depth: float
    """Share of pixels that show the same geom at another depth, by more than 0.5 %, edges aside."""
    rgb: float
    """Share of pixels whose color differs by more than 8 of 255 in some channel."""
    mean_color: float
    """Mean difference of colors, of 255."""
    causes: tuple[str, ...]
    """What makes them differ, the largest share first; and what MuJoCo's full picture shows besides."""

    @property
    def agrees(self) -> bool:
        """Whether the pictures are alike: geoms and depths in all but 0.2 % of pixels, colors in 95 %, mean 2."""
        return max(self.segmentation, self.depth) <= 0.002 and self.rgb <= 0.05 and self.mean_color <= 2

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {getattr(self, name):.2%}" for name in ("segmentation", "depth", "rgb"))
        lines = [f"camera {self.camera!r}: pixels that differ: {shares}; mean color {self.mean_color:.2f} of 255"]
        return "\n".join([*lines, *(f"  {cause}" for cause in self.causes)])


def check_camera(
    model: Model,
    *,
    camera: str | None = None,
    width: int = 128,
    height: int = 128,
    qpos: NDArray[np.float64] | None = None,
    groups: tuple[int, ...] = (0, 1, 2),
    backend: Literal["egl", "osmesa"] = "egl",
) -> list[CameraCheck]:
    """Draw a model with the native camera and with MuJoCo's renderer, and compare.

    Args:
        model: any; it is not changed.
        camera: one of its cameras, or ``free``; None for all, the free one where it has none.
        width: pixels.
        height: pixels.
        qpos: (nq,); the model's where None.
        groups: of geoms and sites.
        backend: what gives OpenGL a context.

    Returns:
        One result per camera.
    """
    names = [model.camera(k).name for k in range(model.ncam)] or [FREE] if camera is None else [camera]
    found: list[CameraCheck] = []
    for name in names:
        spec = CameraSpec(
            name=name, width=width, height=height, data_types=_KINDS, groups=groups, specular=True, reflections=True,
            missing="skip",
        )  # fmt: skip
        refuse_kinds(spec, "gl", ("normals",))
        found.append(_check(model, spec, model.qpos0 if qpos is None else qpos, backend))
    return found


def _check(model: Model, spec: CameraSpec, qpos: NDArray[np.float64], backend: Literal["egl", "osmesa"]) -> CameraCheck:
    plain: Any = _refine_model(model, _without_samples, _without_shadows)
    poses = PoseReader(plain).read(np.array(qpos, np.float64)[None])

    def draw(drawn: Any) -> CameraFrames:
        with closing(make_camera("gl", drawn, spec, backend=backend)) as gl:
            return gl.render(poses)

    theirs, ours = draw(plain), NativeCamera(plain, spec).render(poses)
    their_ids, our_ids = _first(theirs, "segmentation"), _first(ours, "segmentation")
    inside = _inside(their_ids) & _inside(our_ids)
    other = inside & (their_ids != our_ids)
    same = inside & (their_ids == our_ids) & (their_ids >= 0)
    deep = same & (np.abs(_first(ours, "depth") / _first(theirs, "depth") - 1) > 5e-3)
    error = np.abs(_first(ours, "rgb").astype(int) - _first(theirs, "rgb"))
    wrong = error.max(-1) > _NEAR
    causes = _geoms(plain, their_ids, our_ids, wrong)
    for what, change in (
        ("antialiasing", _without_shadows),
        ("shadows (the native camera has those of directional lights: shadows=True)", _without_samples),
    ):
        full = _first(draw(_refine_model(model, change)), "rgb").astype(int)
        share = (np.abs(full - _first(theirs, "rgb")).max(-1) > _NEAR).mean()
        if share > 0:
            causes.append(f"MuJoCo's full picture differs in {share:.2%} of pixels by {what}")
    if (plain.sensor_type == int(mujoco.mjtSensor.mjSENS_RANGEFINDER)).any():
        causes.append("rays of rangefinders are drawn by MuJoCo alone")
    return CameraCheck(
        camera=spec.name,
        segmentation=float(other.mean()),
        depth=float(deep.mean()),
        rgb=float(wrong.mean()),
        mean_color=float(error.mean()),
        causes=tuple(causes),
    )


def _geoms(model: Any, theirs: NDArray[Any], ours: NDArray[Any], wrong: NDArray[np.bool_]) -> list[str]:
    """Name the three geoms with most pixels that differ, and why they may."""
    edges = wrong & ~(_inside(theirs) & _inside(ours))
    causes = list[tuple[float, str]]()
    if edges.any():
        causes.append((float(edges.mean()), "edges, which fall on the other side of a pixel's center"))
    for geom in np.unique(theirs[wrong & ~edges]).tolist():
        share = float((wrong & ~edges & (theirs == geom)).mean())
        if geom < 0:
            causes.append((share, "what is no geom: sky, sites, tendons, skins, flexes"))
            continue
        kind = int(model.geom_type[geom])
        name = model.geom(geom).name or f"number {geom}"
        triangles = kind in (int(mujoco.mjtGeom.mjGEOM_MESH), int(mujoco.mjtGeom.mjGEOM_HFIELD))
        why = (
            "large triangles are lit at their corners by OpenGL, at each pixel here"
            if triangles
            else "light or texture"
        )
        causes.append((share, f"geom {name}: {why}"))
    return [f"{share:.2%} of pixels: {why}" for share, why in sorted(causes, reverse=True)[:4]]


def _refine_model(model: Model, *changes: Callable[[Any], None]) -> Any:
    """Return a copy whose curved geoms have many sides, so that their depth is not that of a polygon."""
    copied: Any = copy.copy(model)
    copied.vis.quality.numslices = copied.vis.quality.numstacks = 64
    for change in changes:
        change(copied)
    return copied


def _without_samples(model: Any) -> None:
    model.vis.quality.offsamples = 0


def _without_shadows(model: Any) -> None:
    model.light_castshadow[:] = 0


def _first(frames: CameraFrames, kind: str) -> NDArray[Any]:
    return getattr(frames, kind)[0]


def _inside(ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Pixels whose eight neighbors show the same geom."""
    padded = np.pad(ids, 1, mode="edge")
    same = np.ones(ids.shape, np.bool_)
    for dy in range(3):
        for dx in range(3):
            same &= padded[dy : dy + ids.shape[0], dx : dx + ids.shape[1]] == ids
    return same


ENVS, STEPS = 32, 20


class GpuCheck(NamedTuple):
    """One comparison of a device with the CPU."""

    name: str
    ok: bool
    found: str
    """The largest difference, or the error."""


def check_gpu(device: torch.device | str = "cuda") -> list[GpuCheck]:
    """Compare every GPU path on ``device`` with its CPU reference; about a minute, most of it compiling."""
    where = torch.device(device)
    return [_check_path(name, limit, compare, where) for name, limit, compare in _COMPARISONS]


def _check_path(
    name: str, limit: float, compare: Callable[[torch.device], list[tuple[Tensor, Tensor]]], device: torch.device
) -> GpuCheck:
    try:
        pairs = compare(device)
        worst = max((_difference(ours.cpu(), theirs) for ours, theirs in pairs), default=0.0)
    # what a driver, a compiler or an extra may miss
    except (HeadraceError, RuntimeError, ImportError, OSError) as error:
        return GpuCheck(name, False, f"{type(error).__name__}: {error}")
    wish = "bit-equal" if limit == 0.0 else f"within {limit:.0e}"
    return GpuCheck(name, worst <= limit, f"differs by {worst:.1e}; expected {wish}")


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    gap = (ours.double() - theirs.double()).abs()
    return float(gap.nan_to_num(nan=float("inf")).max()) if gap.numel() else 0.0


def _numbers(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    from headrace import rng

    ids = torch.arange(ENVS)
    return [(rng.uniform(5, ids.to(device), "check", 7), rng.uniform(5, ids, "check", 7))]


def _physics(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """MuJoCo Warp against native MuJoCo, with suspended environments and episodes that end."""
    import headrace

    def play(sim: SimName, where: torch.device) -> list[Tensor]:
        env = headrace.make("cartpole", ENVS, seed=1, sim=sim, device=where, overrides={"episode_length": 9})
        seen = [env.reset(seed=1)[0]["policy"].cpu()]
        for index in range(STEPS):
            env.suspend(list(range(index % 4, ENVS, 4)))
            step = env.step(torch.full((ENVS, 1), 0.1 * (index % 3), device=where))
            env.resume(list(range(ENVS)))
            seen += [step.obs["policy"].cpu(), step.truncated.cpu()]
        env.close()
        return seen

    there, here = play("warp", device), play("mujoco", torch.device("cpu"))
    return list(zip(there, here, strict=True))


_COMPARISONS: list[tuple[str, float, Callable[[torch.device], list[tuple[Tensor, Tensor]]]]] = [
    ("random numbers", 0.0, _numbers),
    ("physics of cartpole, suspension and resets", 5e-3, _physics),
]
