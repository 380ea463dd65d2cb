"""``BatchEnv``: N environments of one task, any subset of which can act."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, Unpack

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from headrace._device import to_device
from headrace._kernels.threads import stop_workers
from headrace.envs._episode_state import EpisodeState, StepOutcome
from headrace.envs._observations import HeldObservations
from headrace.envs.episodic_env import AUTORESET_MODES, EpisodicEnv, check_snapshot
from headrace.envs.recipe import EpisodeRules
from headrace.envs.task import Rows, Task, device_actions, refuse_actions, select_actions
from headrace.errors import ConfigError, DtypeError, ShapeError
from headrace.ids import check_ids, check_mask, check_seed
from headrace.sim import Simulation
from headrace.sim.mujoco_sim import MujocoSim
from headrace.types import Ids, Obs, StateDict, Step, StepInfo, SubstepObserver, SubstepRecord

if TYPE_CHECKING:
    from headrace.envs.viewer import Viewer

_LOG = logging.getLogger("headrace.envs")
_TILES = 16


class BatchEnv(EpisodicEnv):
    """N environments of one task as a ``gymnasium.vector.VectorEnv`` of torch tensors on one device.

    Computes in float64 and returns float32. Stages work on the compact rows of the active environments; a suspended one
    costs no physics and no task code, and nothing of it changes by one bit. Every tensor that ``step`` and ``reset``
    return is fresh: the caller owns it. Make one with :func:`headrace.make`.
    """

    def __init__(
        self, task: Task, sim: Simulation, *, threads: int | None = None, **episodes: Unpack[EpisodeRules]
    ) -> None:
        """Put a task on a simulation.

        Args:
            task: what to do; its model is the simulation's.
            sim: where to do it; the environment closes it.
            threads: for the cameras; None for all cores.
            **episodes: seed, autoreset, final_obs, episode_stride, as for :func:`headrace.make`.
        """
        if task.current_positions and not sim.current_positions:
            raise ConfigError(
                f"{type(task).__name__} reads contacts of the state after a step, which {type(sim).__name__} does not "
                'compute; use headrace.make with sim="mujoco", or MujocoSim(…, current_positions=True)'
            )
        if task.controlled and not isinstance(sim, MujocoSim):
            raise ConfigError(f'{type(task).__name__} computes controls between physics steps; use sim="mujoco"')
        super().__init__(sim.num_envs, sim.device, task.memory, **episodes)
        self.task = task
        self.sim = sim
        self.metadata = {
            "autoreset_mode": AUTORESET_MODES[self.autoreset],
            "render_modes": ["rgb_array"],
            "render_fps": round(1.0 / task.dt),
        }
        self.render_mode = "rgb_array"
        self.single_observation_space = task.observation_space
        self.single_action_space = task.action_space
        self.observation_space = batch_space(task.observation_space, self.num_envs)
        self.action_space = batch_space(task.action_space, self.num_envs)
        self._held = HeldObservations(
            task.observation_space,
            task.images,
            sim,
            threads,
            None if task.shown_positions is None else self._episodes.memory[task.shown_positions],
        )
        self._viewer: Viewer | None = None
        self._explained: set[str] = set()
        rehearse(task, sim)

    reseeds: bool = True
    """Every episode is a function of (seed, episode id, actions)."""
    no_identity: str = ""

    fidelity: Literal["native"] = "native"
    """How a suspended environment is kept: it is skipped, exactly."""

    @property
    def frames_drawn(self) -> int:
        """How many camera frames have been rendered so far, final observations included."""
        return self._held.frames_drawn

    # --- episodes -----------------------------------------------------------------------------------------------

    def reset(  # pyright: ignore[reportIncompatibleMethodOverride]  # info is typed more narrowly
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[Obs, StepInfo]:
        """Start new episodes.

        Args:
            seed: a new seed, for a reset of all; environment i then begins with episode i again.
            options: ``reset_mask`` (bool (N,)) resets only some; ``episode_ids`` (int64, one per reset environment or
                (N,)) says which episodes to run, from which ids go on in steps of ``episode_stride``; ``observe``
                (bool (N,)) says whose cameras will be read, as in ``step``. A suspended environment is reset
                and stays suspended.

        Returns:
            The observation of all N environments, and an info.
        """
        request = self._reset_request(options)
        with self._alone("reset"):
            if seed is not None:
                self._episodes.restart(check_seed(seed, of_all=request.ids is None))
            ids = self._episodes.all_ids if request.ids is None else request.ids
            begin = len(ids) > 0
            obs = self._begin(ids, ids.cpu(), request.episode_ids, request.observe) if begin else self._held.rows()
        self._ready, self._failure = True, ""
        return obs, {}

    def _step(self, actions: Tensor, observe: Tensor | None) -> Step:
        ids = self._active_set.ids
        wanted = None if observe is None else check_mask(observe, self.num_envs, self.device, name="observe")
        acting = self._episodes.all_ids if ids is None else ids
        refused: Tensor | None = None
        if self.device.type == "cpu":
            actions, chosen = select_actions(actions, self.task.action_space, ids, self._episodes.all_ids)
        else:
            actions, chosen, refused = device_actions(actions, self.task.action_space, ids, self._episodes.all_ids)
        if not acting.shape[0]:
            return self._idle_step(wanted)
        try:
            step, ended, host = self._step_rows(ids, actions, chosen, refused, wanted)
        except BaseException as error:  # also Ctrl-C; raised again
            self._fail(error)
            raise
        try:
            if self._observers:
                self.timer.start("observers")
                self._show_step(acting, actions, step, self._states_for_observers(ids))
        finally:
            # also when an observer raised: an ended episode must not go on
            if ended is not None and host is not None and self.autoreset == "same_step":
                step = step._replace(obs=self._begin(ended, host))
            self.timer.stop()
        return step

    def _step_rows(
        self, ids: Tensor | None, actions: Tensor, chosen: Tensor, refused: Tensor | None, wanted: Tensor | None
    ) -> tuple[Step, Tensor | None, Tensor | None]:
        """Return the step by the functions of the task, and the environments whose episodes ended, on device and
        host."""
        rows = Rows(self.sim, self._episodes, ids)
        self.timer.start("task")
        self.task.apply_action(rows, chosen)
        self.timer.start("physics")
        failed = self._advance(ids, rows)
        self.timer.start("task")
        rows.renew()
        self._episodes.advance(ids)
        obs = self.task.observe(rows)
        reward = self.task.reward(rows, chosen)
        terminated = self.task.terminated(rows)
        unfit = None if failed is None else failed.index_select(0, rows.ids)
        diverged = self._held.post(rows.ids, obs, reward, unfit)
        limit = self.task.cfg.episode_length
        outcome = self._episodes.finish(ids, reward, terminated, diverged, limit, refused=refused)
        if self._held.has_cameras:
            seen, there = self._active_set.rows, rows.ids
            if outcome.diverged.shape[0]:
                seen = np.delete(seen, outcome.diverged.numpy())
                there = to_device(torch.from_numpy(seen), self.device)
            self._held.note_poses(seen, there, self._episodes)
        if outcome.refused:
            refuse_actions(actions, self.task.action_space, ids)
        return self._close(ids, outcome, diverged, wanted)

    def observe(self, ids: Ids | None = None) -> Obs:
        """Return the current observation of some environments (None: all), (n, …), rendered now where it was not.

        Rows come in the order of the ids, those of a mask in ascending order. Nothing advances; the caller owns the
        tensors.
        """
        if self.closed or not self._ready:
            self._check_ready("observe")
        rows = None if ids is None else check_ids(ids, self.num_envs, self.device, ascending=False)
        if self._held.has_cameras:
            with self.timer.measure("render"):
                self._held.draw((self._episodes.all_ids if rows is None else rows).cpu().numpy(), self._episodes)
        return self._held.rows(rows)

    def rows(self, ids: Ids | None = None) -> Rows:
        """Return the rows that a task's functions are given, of some environments (None: all):
        ``task.observe(env.rows())``.

        What is read through them is a copy; what is written changes the environments.
        """
        self._check_ready("rows")
        return Rows(self.sim, self._episodes, None if ids is None else check_ids(ids, self.num_envs, self.device))

    # --- saving, looking, ending -------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return everything needed to go on bit-identically, in this or another process.

        Save it with ``torch.save``.
        """
        self._check_ready("state_dict")
        return self._snapshot()

    def _snapshot(self) -> StateDict:
        return self._bookkeeping(self.task.identity) | {
            "sim": self.sim.state_dict(),
            "observations": self._held.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict` of an environment of the same task and ``num_envs``."""
        self._check_open()
        check_snapshot(state, self._snapshot())
        self.sim.load_state_dict(state["sim"])
        self._held.load_state_dict(state["observations"])
        self._load_bookkeeping(state)

    def render(self) -> NDArray[np.uint8]:  # pyright: ignore[reportIncompatibleMethodOverride]  # one tiled picture
        """Return the first 16 environments as one tiled picture, uint8 (height, width, 3); the caller owns it."""
        self._check_ready("render")
        from headrace.envs.viewer import tile

        first = torch.arange(min(_TILES, self.num_envs), device=self.device)
        return tile(self._open_viewer().pictures(first))

    def render_each(self, ids: Ids | None = None, *, renderer: str = "native") -> tuple[NDArray[np.uint8], ...]:
        """Return one picture of each of some environments (None: all), uint8 (height, width, 3); no other is drawn.

        ``renderer`` is ``native``, ``gl`` (MuJoCo's own picture), ``warp`` or a name of ``sim.register_camera``.
        """
        self._check_ready("render_each")
        rows = None if ids is None else check_ids(ids, self.num_envs, self.device, ascending=False)
        return tuple(self._open_viewer(renderer).pictures(rows))

    def open_renderer(self, name: str) -> Callable[[Ids | None], tuple[NDArray[np.uint8], ...]]:
        """:meth:`render_each` with a renderer that is made now: one that cannot work (no OpenGL) raises at once."""
        self._open_viewer(name)
        return partial(self.render_each, renderer=name)

    def close_extras(self, **_: object) -> None:
        """Release simulation, cameras and threads; called by ``close``."""
        self._held.close()
        if self._viewer is not None:
            self._viewer.close()
        self.sim.close()
        stop_workers()

    # --- inside a step ------------------------------------------------------------------------------------------

    def _advance(self, ids: Tensor | None, rows: Rows, *, watched: bool = True) -> Tensor | None:
        """Run the physics of a step; bool (N,): whose simulation failed, None if none failed."""
        count, controlled = self.task.cfg.decimation, self.task.controlled
        watched = watched and bool(self._observers) and self._needs("substeps")
        if not watched and not controlled:
            return self.sim.step(ids, count)
        env_ids = self._episodes.all_ids if ids is None else ids
        episode_ids = self._episodes.episode_ids.index_select(0, env_ids)
        failed: Tensor | None = None
        going = ids
        for index in range(count):
            if controlled:
                assert isinstance(self.sim, MujocoSim)
                self.sim.refresh(going)
                self.task.control(rows, index)
            lost = self.sim.step(going, 1)
            if lost is not None:
                failed = lost if failed is None else failed | lost
                if failed.is_cpu:
                    # one that failed stays as it is, as within one call for all substeps; on a GPU it goes on in both
                    going = env_ids[~failed.index_select(0, env_ids)]
                    rows = Rows(self.sim, self._episodes, going)
            if watched:
                self._show_substep(index, env_ids, episode_ids, self.sim.states(ids))
        return failed

    def _show_substep(self, index: int, env_ids: Tensor, episode_ids: Tensor, states: Tensor) -> None:
        count = self.task.cfg.decimation
        record = SubstepRecord(env_ids=env_ids, episode_ids=episode_ids, index=index, count=count, states=states)
        for observer in self._observers:
            if "substeps" in observer.needs and isinstance(observer, SubstepObserver):
                observer.after_substep(record)

    def _close(
        self, ids: Tensor | None, outcome: StepOutcome, diverged: Tensor | None, wanted: Tensor | None
    ) -> tuple[Step, Tensor | None, Tensor | None]:
        """Draw what will be read and put the step together; the episodes that ended have not been restarted yet."""
        info: StepInfo = {}
        ended_ids, host_ids = None, outcome.ended
        if outcome.ended.shape[0]:
            host_ids = self._active_set.rows_to_envs(outcome.ended)
            ended_ids, ended = to_device(host_ids, self.device), to_device(outcome.ended, self.device)
            success = self.task.success(Rows(self.sim, self._episodes, ended_ids))
            gone = None if diverged is None else diverged.index_select(0, ended)
            ends, totals, mask = self._episodes.ends(ended_ids, success, gone)
            info = {"ends": ends, "episode": totals, "_episode": mask}
            if gone is not None and outcome.diverged.shape[0]:
                self.divergences += outcome.diverged.shape[0]
                self._explain(ended_ids[gone])
        if wanted is not None:
            info["observed"] = self._rows_to_read(ids, ended_ids, wanted)
        if self._held.has_cameras:
            self._draw(info.get("observed"), host_ids)
        restarts = ended_ids is not None and self.autoreset == "same_step"
        # where episodes begin in this step, what is shown now is replaced at once: only observers see all of it
        obs = self._held.rows() if not restarts or self._observers else {}
        if ended_ids is not None:
            if self.autoreset == "disabled":
                self._active_set.park(host_ids)
            elif self._wants_final_obs:
                info["final_obs"] = self._held.last(ended_ids)
                info["_final_obs"] = self._make_mask(ended_ids)
        return Step(obs, outcome.reward, outcome.terminated, outcome.truncated, info), ended_ids, host_ids

    def _explain(self, ids: Tensor) -> None:
        """Say once why simulations failed, where the user can do something about it."""
        reason = self.sim.explain(ids)
        if reason and reason not in self._explained:
            self._explained.add(reason)
            _LOG.warning("environments end as diverged: %s", reason)

    def _rows_to_read(self, ids: Tensor | None, ended_ids: Tensor | None, wanted: Tensor) -> Tensor:
        """Return bool (N,), fresh: active and wanted, or at the end of an episode."""
        if self._needs("frames"):
            wanted = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        read = wanted.clone() if ids is None else wanted & self._make_mask(ids)
        return read if ended_ids is None else read | self._make_mask(ended_ids)

    def _draw(self, read: Tensor | None, ended: Tensor) -> None:
        """Render the rows that will be read; a last observation only if final observations are wanted.

        Args:
            read: bool (N,): whose observation; None for all that act.
            ended: int64 (m,), on the host: whose episode ended.
        """
        self.timer.start("render")
        shown = self._active_set.rows if read is None else np.flatnonzero(read.cpu().numpy())
        if ended.shape[0] and not (self._wants_final_obs or self._needs("frames")):
            shown = np.setdiff1d(shown, ended.numpy(), assume_unique=True)
        self._held.draw(shown, self._episodes)
        self.timer.start("task")

    def _begin(
        self, ids: Tensor, host: Tensor, episode_ids: Tensor | None = None, observe: Tensor | None = None
    ) -> Obs:
        """Start an episode in each of ``ids`` (m,), with the given identities or their next ones.

        ``host`` is ``ids`` on the host. Cameras are drawn for those of them that ``observe`` (int64 (k,); None: all)
        names. Returns all rows, fresh.
        """
        self.timer.start("reset")
        try:
            self._begin_rows(ids, host, episode_ids, observe)
            obs = self._held.rows()
        except BaseException as error:  # also Ctrl-C; raised again
            self._fail(error)
            raise
        if self._observers:
            self._show_reset(ids, host, obs, self._states_for_observers(ids))
        self.timer.stop()
        return obs

    def _begin_rows(self, all_ids: Tensor, host: Tensor, episode_ids: Tensor | None, observe: Tensor | None) -> None:
        """:meth:`_begin` by the functions of the task."""
        ids = None if all_ids is self._episodes.all_ids else all_ids
        rows = Rows(self.sim, self._episodes, ids)
        self._episodes.begin(all_ids, episode_ids)
        self.sim.reset(ids)
        self.task.reset(rows)
        self.sim.forward(ids)
        rows.renew()
        self.task.settle(rows, partial(self._settle, ids, rows))
        self._instruct(host, self.task.instructions(rows))
        self._held.show(all_ids, self.task.observe(rows))
        if self._held.has_cameras:
            shown = host.numpy()
            self._held.note_poses(shown, all_ids, self._episodes, begins=True)
            if observe is not None and not self._needs("frames"):
                shown = shown[np.isin(shown, observe.cpu().numpy())]
            self._held.draw(shown, self._episodes)
        self._active_set.unpark(host)

    def _settle(self, ids: Tensor | None, rows: Rows, actions: Tensor) -> None:
        """Take a step that does not count."""
        self.task.apply_action(rows, actions)
        self._advance(ids, rows, watched=False)
        rows.renew()

    def _states_for_observers(self, ids: Tensor | None) -> Tensor | None:
        return self.sim.states(ids) if self._needs("states") else None

    def _shown(self) -> Obs:
        return self._held.rows()

    def _open_viewer(self, renderer: str = "native") -> Viewer:
        if self._viewer is None or self._viewer.renderer != renderer:
            from headrace.envs.viewer import Viewer  # loads a renderer: only for those who look

            viewer = Viewer(self.sim, images=self.task.images, renderer=renderer)
            if self._viewer is not None:
                self._viewer.close()
            self._viewer = viewer
        return self._viewer


def rehearse(task: Task, sim: Simulation) -> None:
    """Call each row function once on environment 0, check what it returns, and put the simulation back."""
    episodes = EpisodeState(sim.num_envs, sim.device, task.memory)
    episodes.episode_ids.zero_()
    ids = torch.zeros(1, dtype=torch.int64, device=sim.device)
    rows = Rows(sim, episodes, ids)
    sim.reset(ids)
    task.reset(rows)
    sim.forward(ids)
    actions = _zero_actions(task, sim.device)
    task.apply_action(rows, actions)
    task.control(rows, 0)
    task.settle(rows, lambda _: None)
    obs = task.observe(rows)
    expected = set(task.observation_space.spaces) - set(task.images)
    if set(obs) != expected:
        raise ShapeError(f"{_name(task)}.observe: expected the groups {sorted(expected)}, got {sorted(obs)}")
    for group in expected:
        space = task.observation_space.spaces[group]
        _check(task, f"observe[{group!r}]", obs[group], (1, *(space.shape or ())), torch.float64)
    _check(task, "reward", task.reward(rows, actions), (1,), torch.float64)
    _check(task, "terminated", task.terminated(rows), (1,), torch.bool)
    success = task.success(rows)
    if (success is None) != (task.success_measure is None):
        raise ShapeError(f"{_name(task)}: expected success_measure (in words) and success(rows), or neither")
    if success is not None:
        _check(task, "success", success, (1,), torch.bool)
    texts = task.instructions(rows)
    if texts is not None and [type(text) for text in texts] != [str]:
        raise ShapeError(f"{_name(task)}.instructions: expected one text for one row, got {texts!r}")
    sim.reset(ids)
    sim.seal()


def _zero_actions(task: Task, device: torch.device) -> Tensor:
    if isinstance(task.action_space, spaces.Discrete):
        return torch.full((1,), int(task.action_space.start), dtype=torch.int64, device=device)
    return torch.zeros((1, *task.action_space.shape), dtype=torch.float64, device=device)


def _check(task: Task, what: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(value.shape) != shape:
        raise ShapeError(f"{_name(task)}.{what}: expected shape {shape} for one row, got {tuple(value.shape)}")
    if value.dtype != dtype:
        raise DtypeError(f"{_name(task)}.{what}: expected {dtype}, got {value.dtype}")


def _name(task: Task) -> str:
    return type(task).__name__
