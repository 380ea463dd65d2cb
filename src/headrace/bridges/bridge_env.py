"""``BridgeEnv``: environments that we did not write, under the contract of ``BatchEnv``.

What a bridge holds of its environments: their last observations, and how a step's results are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, Unpack, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from headrace import rng
from headrace._device import to_device
from headrace.bridges._exchange import Exchange, ExchangeLayout, as_action_space, group_space
from headrace.bridges.child import NO_SUCCESS_MEASURE, RESULTS
from headrace.bridges.executors import Backend, Fidelity
from headrace.envs.episodic_env import AUTORESET_MODES, EpisodicEnv, check_snapshot, parse_reset_options
from headrace.envs.recipe import EpisodeRules
from headrace.envs.task import check_actions
from headrace.errors import DtypeError, EnvError, LifecycleError, ShapeError, UnsupportedError
from headrace.ids import check_ids, check_seed
from headrace.types import Ids, Obs, StateDict, Step, StepInfo, StepObserver

_FLOAT32_MAX = torch.finfo(torch.float32).max


class Results(NamedTuple):
    """What a step made of n rows."""

    reward: Tensor
    """float64 (n,)."""
    terminated: Tensor
    truncated: Tensor
    diverged: Tensor | None
    """bool (n,): rows with a number that is not finite; None if there are none."""


class TensorExchange:
    """What crosses between environments and the bridge: tensors (N, …) on one device.

    Those of a batched simulator are its own, and lie here between a step and the moment they are held; nothing is
    copied for it. Those of an :class:`Exchange` are views of its memory (:meth:`over`).
    """

    def __init__(
        self, layout: ExchangeLayout, device: torch.device, idle_action: Tensor | None, actions: Tensor
    ) -> None:
        self.layout, self.device = layout, device
        self.idle_action = idle_action
        """For simulators that get fresh actions for each step: what rows without an action play."""
        self.actions = actions
        self.obs: dict[str, Tensor] = {}
        self.reward, self.terminated, self.truncated = (torch.empty(0),) * 3
        self.success: Tensor | None = None
        self._leaves = [(leaf, getattr(torch, str(leaf.dtype))) for leaf in layout.leaves]

    @classmethod
    def over(cls, exchange: Exchange) -> TensorExchange:
        """Return views of an exchange in the memory of this machine."""
        tensors = {name: _view(rows) for name, rows in exchange.arrays.items()}
        views = cls(exchange.layout, torch.device("cpu"), None, tensors.pop("actions"))
        for name in RESULTS:
            setattr(views, name, tensors.pop(name))
        views.obs = {name.removeprefix("obs:"): rows for name, rows in tensors.items()}
        return views

    def write_obs(self, obs: object) -> None:
        """Take a batched observation, with its shapes and dtypes checked."""
        for leaf, dtype in self._leaves:
            value = as_tensor(leaf.of(obs), self.device)
            expected = (self.layout.num_envs, *leaf.shape)
            if tuple(value.shape) != expected:
                raise ShapeError(f"observation {leaf.name!r}: expected shape {expected}, got {tuple(value.shape)}")
            if value.dtype != dtype and value.is_floating_point() != dtype.is_floating_point:
                raise DtypeError(
                    f"observation {leaf.name!r}: expected {dtype} as its space says, got {value.dtype}; make the "
                    "simulator return what its observation_space declares"
                )
            self.obs[leaf.name] = value.to(dtype)


class HeldRows:
    """The rows of a bridge on one device; ``shown`` and ``rows`` give copies."""

    def __init__(self, exchange: Exchange | TensorExchange, late: frozenset[str]) -> None:
        """Hold rows of ``exchange``; observations of the keys ``late`` are read on demand."""
        self._exchange = exchange if isinstance(exchange, TensorExchange) else TensorExchange.over(exchange)
        self.device = self._exchange.device
        layout = exchange.layout
        self._dtypes = {leaf.name: getattr(torch, str(leaf.dtype)) for leaf in layout.leaves}
        # torch cannot index every unsigned type of a space: these are held as signed ones of the same bits
        self._held: Obs = {
            leaf.name: _view(np.zeros((layout.num_envs, *leaf.shape), leaf.dtype)).to(self.device)
            for leaf in layout.leaves
        }
        self.late = [leaf.name for leaf in layout.leaves if leaf.is_of(late)]
        """Groups that are drawn on demand."""
        self._stale = torch.zeros(layout.num_envs, dtype=torch.bool)
        """Whose late groups are not those of the last step or reset."""

    def write_actions(self, actions: Tensor, active_ids: Tensor | None) -> None:
        """Hand over the actions of the environments that act, in the dtype of the space; the others stay."""
        exchange = self._exchange
        if exchange.idle_action is not None:
            exchange.actions = exchange.idle_action.expand(exchange.actions.shape).clone()
        target = exchange.actions
        if active_ids is None:
            target.copy_(actions)
        else:
            target.index_copy_(0, active_ids, actions.index_select(0, active_ids).to(target.dtype))

    def results(self, rows: Tensor) -> Results:
        """Return what the last step made of ``rows``, int64 (n,)."""
        exchange = self._exchange
        all_rows = rows.shape[0] == exchange.layout.num_envs
        reward, terminated, truncated = (
            values if all_rows else values.index_select(0, rows)
            for values in (exchange.reward, exchange.terminated, exchange.truncated)
        )
        return Results(reward, terminated, truncated, self._find_diverged(rows, reward))

    def not_finite(self, rows: Tensor) -> Tensor | None:
        """Return bool (n,): which of ``rows`` have an observation that is not finite; None if none has."""
        return self._find_diverged(rows, torch.zeros((), device=self.device))

    def success(self, rows: Tensor) -> Tensor:
        """int8 (n,): 1, 0, or that there is no such measure."""
        success = self._exchange.success
        if success is None:
            return torch.full(rows.shape, NO_SUCCESS_MEASURE, dtype=torch.int8, device=self.device)
        return success.index_select(0, rows)

    def stale(self, rows: Tensor) -> Tensor:
        """Return those of ``rows`` whose late groups must be drawn before they are read."""
        return rows[self._stale[rows]] if self.late else rows[:0]

    def hold(self, rows: Tensor, *, late: bool = False) -> None:
        """Take over the observation of ``rows`` from the last step or reset, or what was drawn ``late``."""
        if self.late:
            self._stale[rows] = not late
        for group, held in self._held.items():
            if (group in self.late) != late:
                continue
            values = self._exchange.obs[group]
            if rows.shape[0] == held.shape[0]:  # one copy; choosing rows takes two
                held.copy_(values)
            else:
                held.index_copy_(0, rows, values.index_select(0, rows))

    def shown(self) -> Obs:
        """Return the observation of every environment."""
        return {group: held.clone().view(self._dtypes[group]) for group, held in self._held.items()}

    def rows(self, rows: Tensor) -> Obs:
        """Return the observation of some environments."""
        return {group: held.index_select(0, rows).view(self._dtypes[group]) for group, held in self._held.items()}

    def load(self, obs: Obs) -> None:
        """Take over the observations of a snapshot."""
        self._stale[:] = False
        for group, held in self._held.items():
            held.copy_(obs[group].view(held.dtype))

    def _find_diverged(self, rows: Tensor, reward: Tensor) -> Tensor | None:
        """Return the rows whose reward is not finite as float32; 1e60 is infinite there."""
        all_rows = rows.shape[0] == self._exchange.layout.num_envs
        floats = [
            values if all_rows else values.index_select(0, rows)
            for values in self._exchange.obs.values()
            if values.is_floating_point()
        ]
        if self.device.type == "cpu":  # numpy's calls cost a third of torch's, which is most of it for small rows
            fine = bool((np.abs(reward.numpy()) <= _FLOAT32_MAX).all())
            fine = fine and all(bool(np.isfinite(values.numpy()).all()) for values in floats)
        else:
            # one wait for the device: a sum of finite numbers is finite, but for an overflow
            total = torch.where(reward.abs() <= _FLOAT32_MAX, 0.0, torch.inf).sum()
            for values in floats:
                total = total + values.sum(dtype=torch.float64)
            fine = bool(torch.isfinite(total))
        if fine:
            return None
        finite = (reward.abs() <= _FLOAT32_MAX).expand(rows.shape).clone()
        for values in floats:
            # a number alone has no axis but that of the rows
            finite &= torch.isfinite(values)[:, None].flatten(1).all(dim=1)
        return None if bool(finite.all()) else ~finite


def as_tensor(value: Any, device: torch.device) -> Tensor:
    """Return an array of torch, numpy or DLPack as a tensor on ``device``; memory is shared where it can be."""
    if not isinstance(value, Tensor):
        if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
            array = np.asarray(value)
            value = torch.from_numpy(array if array.flags.writeable else array.copy())
        else:
            value = torch.from_dlpack(value)
    return value.detach().to(device)


def _view(array: NDArray[Any]) -> Tensor:
    """Return a tensor over the memory of an array, unsigned numbers of several bytes as signed ones."""
    wide = array.dtype.kind == "u" and array.dtype.itemsize > 1
    return torch.from_numpy(array.view(f"i{array.dtype.itemsize}") if wide else array)


_T = TypeVar("_T")


class BridgeEnv(EpisodicEnv):
    """N environments that we did not write as torch tensors, any subset of which can act.

    Tensors are on the CPU, but for a batched simulator in this process, whose device they stay on. Each episode is
    seeded from (seed, episode id), where the simulator allows it (``reseeds``). Every tensor that ``step`` and
    ``reset`` return is fresh: the caller owns it. Make one with :func:`headrace.bridge`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        render_mode: str | None,
        **episodes: Unpack[EpisodeRules],
    ) -> None:
        """Put the contract on a backend, which the environment closes.

        Args:
            backend: who resets and steps the environments.
            name: what the environments are; a snapshot is loaded only into an environment of the same name.
            observation_space: of one environment, as it declares it.
            action_space: of one environment.
            render_mode: of the environments.
            **episodes: seed, autoreset, final_obs, episode_stride, as for :func:`headrace.bridge`.
        """
        num_envs = backend.exchange.layout.num_envs
        self._held = HeldRows(backend.exchange, backend.late)
        super().__init__(num_envs, self._held.device, {}, **episodes)
        self.name = name
        self.seeds_of: Callable[[int, Tensor], list[int]] = episode_seeds
        """What ``reset(seed=…)`` of each environment is given, from the seed and the episodes' ids."""
        self.metadata = {"autoreset_mode": AUTORESET_MODES[self.autoreset], "render_modes": ["rgb_array"]}
        self.render_mode = render_mode
        self.single_observation_space = group_space(observation_space)
        self._action_space = as_action_space(action_space)
        self.single_action_space = action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.backend = backend
        self.fidelity: Fidelity = backend.fidelity
        """How a suspended environment is kept: ``native`` (skipped) or ``restore`` (put back after each step)."""
        self.reseeds = backend.reseeds
        """Whether every episode is seeded from (seed, episode id): then it is a function of them and the actions. Not
        so for simulators whose generators cannot be seeded anew."""
        self.no_identity = "" if self.reseeds else backend.no_identity
        """Why episodes are not functions of (seed, episode id), as far as the simulator says; "" where they are."""
        self.overlaps_resets = backend.overlaps_resets
        """Whether :meth:`begin_reset` works: environments of threads, processes and other interpreters."""
        self._background: set[int] = set()
        """Environments whose reset is under way."""
        self._knows_success = False

    frames_drawn: int = 0
    """Pictures drawn on demand; those that an environment draws in its steps are not counted."""

    # --- episodes -----------------------------------------------------------------------------------------------

    def reset(  # pyright: ignore[reportIncompatibleMethodOverride]  # info is typed more narrowly
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[Obs, StepInfo]:
        """Start new episodes.

        Args:
            seed: a new seed, for a reset of all; environment i then begins with episode i again.
            options: ``reset_mask`` (bool (N,)) resets only some; ``episode_ids`` (int64, one per reset environment or
                (N,)) says which episodes to run, from which ids go on in steps of ``episode_stride``.
                A suspended environment is reset and stays suspended.

        Returns:
            The observation of all N environments, and an info.
        """
        request = self._reset_request(options)
        if request.ids is not None:
            self._check_settled("reset with reset_mask", request.ids)
        with self._alone("reset"):
            if request.ids is None:
                self._drop_resets()
            if seed is not None:
                self._episodes.restart(check_seed(seed, of_all=request.ids is None))
            if request.ids is None or len(request.ids):
                all_ids = self._episodes.all_ids if request.ids is None else request.ids
                self._begin(all_ids, request.episode_ids)
                self._draw(all_ids, request.observe)
        self._ready, self._failure = True, ""
        return self._shown(), {}

    @property
    def resetting(self) -> Tensor:
        """bool (N,), a copy: who cannot act before a reset under way is done, their own or one of their process."""
        return self._make_mask(torch.tensor(self.backend.resetting(), dtype=torch.int64, device=self.device))

    def begin_reset(self, options: dict[str, object] | None = None) -> None:
        """Begin new episodes in the background: other environments can be stepped meanwhile.

        An environment is inactive, and shows its last observation, until :meth:`finish_resets` says that it is ready.
        A process does one thing at a time: a step of its other environments waits for the reset (:attr:`resetting`).

        Args:
            options: ``reset_mask`` and ``episode_ids``, as for :meth:`reset`.
        """
        self._check_ready("begin_reset")
        request = parse_reset_options(options, self.num_envs, self.device)
        ids = self._episodes.all_ids if request.ids is None else request.ids
        if not self.overlaps_resets:
            raise UnsupportedError(
                f'begin_reset: {self.name} is reset where it is stepped; bridge it with executor="threads" or '
                '"processes", or use reset()'
            )
        self._check_settled("begin_reset", ids)
        if not len(ids):
            return
        with self._alone("begin_reset"):
            self._active_set.park(ids)
            seeds = self._next_seeds(ids, request.episode_ids)
            self._background.update(ids.tolist())
            self._call_backend(lambda: self.backend.begin_reset(ids.tolist(), seeds))

    def finish_resets(self, timeout: float | None = 0.0) -> Tensor:
        """Let environments act whose background reset is done; their ids, int64 (n,), ascending.

        Waits until one is ready, for ``timeout`` seconds at most (None: as long as it takes).
        """
        self._check_ready("finish_resets")
        with self._alone("finish_resets"):
            texts = self._call_backend(lambda: self.backend.take_resets(timeout))
            ids = torch.tensor(sorted(texts), dtype=torch.int64, device=self.device)
            if texts:
                self._background.difference_update(texts)
                self._show_begun(ids, [texts[env_id] for env_id in ids.tolist()])
        return ids

    def _step(self, actions: Tensor, observe: Tensor | None) -> Step:
        ids = self._active_set.ids
        actions = check_actions(actions, self._action_space, ids, self.num_envs, self.device)
        wanted = (
            None if observe is None else self._make_mask(check_ids(observe, self.num_envs, self.device, name="observe"))
        )
        if ids is not None and not ids.shape[0]:
            return self._idle_step(wanted)
        rows = self._episodes.all_ids if ids is None else ids
        self._held.write_actions(actions, ids)
        self.timer.start("envs")
        self._call_backend(lambda: self.backend.step(rows.tolist()))
        self.timer.stop()
        step, ended_ids = self._evaluate(rows, wanted)
        try:
            if self._observers:
                self._show_step(rows, actions, step, states=None)
        finally:
            # also when an observer raised: an ended episode must not go on
            if ended_ids is not None and self.autoreset == "same_step":
                self._begin(ended_ids, None)
                self._draw(ended_ids)
                step = step._replace(obs=self._shown())
        return step

    def observe(self, ids: Ids | None = None) -> Obs:
        """Return the current observation of some environments (None: all), (n, …); the caller owns it.

        Rows come in the order of the ids, those of a mask in ascending order.
        """
        self._check_ready("observe")
        chosen = self._episodes.all_ids if ids is None else check_ids(ids, self.num_envs, self.device, ascending=False)
        self._draw(chosen)
        return self._shown() if ids is None else self._held.rows(chosen)

    # --- watching, saving, ending -------------------------------------------------------------------------------

    def attach(self, observer: StepObserver) -> None:
        """Let ``observer`` see every step and reset from now on. Attach before ``reset`` to see episodes begin."""
        if observer.needs & {"states", "substeps"}:
            raise UnsupportedError(
                f"attach: {type(observer).__name__} needs physics states, which a bridged environment does not show; "
                "use a task of headrace.make, or an observer that does without"
            )
        super().attach(observer)

    def state_dict(self) -> StateDict:
        """Return everything needed to go on bit-identically, in this or another process; save it with ``torch.save``.

        Raises:
            UnsupportedError: the environments cannot be saved faithfully; the message says what is in the way.
        """
        self._check_ready("state_dict")
        self._check_settled("state_dict", self._episodes.all_ids)
        return self._snapshot_rest() | {"sim": {"envs": self.backend.save(), "knows_success": self._knows_success}}

    def _snapshot_rest(self) -> dict[str, object]:
        """Return the snapshot without the environments themselves."""
        self._draw(self._episodes.all_ids)
        return self._bookkeeping(self.name) | {"observations": {"held": self._shown()}}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict` of a bridge to the same environments. It unpickles: load what you trust."""
        self._check_open()
        check_snapshot(state, self._snapshot_rest())
        self._drop_resets()
        self._call_backend(lambda: self.backend.restore(state["sim"]["envs"]))
        self._knows_success = bool(state["sim"]["knows_success"])
        self._held.load(state["observations"]["held"])
        self._load_bookkeeping(state)

    def render_each(self, ids: Ids | None = None) -> tuple[NDArray[np.uint8], ...] | None:
        """Return one picture (H, W, 3) of each of some environments (None: all).

        None where the environments were made without ``rgb_array``. Others are not drawn.
        """
        self._check_ready("render")
        if self.render_mode != "rgb_array":
            return None
        chosen = self._episodes.all_ids if ids is None else check_ids(ids, self.num_envs, self.device, ascending=False)
        rows = chosen.tolist()
        self._check_settled("render", chosen)
        return tuple(_picture(env_id, drawn) for env_id, drawn in zip(rows, self.backend.render(rows), strict=True))

    def render(self) -> NDArray[np.uint8] | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # one picture
        """Return all environments in one tiled picture, (H, W, 3); None as for :meth:`render_each`."""
        pictures = self.render_each()
        if pictures is None:
            return None
        from headrace.envs.viewer import tile  # brings a renderer: only for those who look

        return tile(np.stack(pictures), gap=0)

    def close_extras(self, **_: object) -> None:
        """Release the environments; called by ``close``."""
        self.backend.close()

    # --- inside a step ------------------------------------------------------------------------------------------

    def _evaluate(self, rows: Tensor, wanted: Tensor | None) -> tuple[Step, Tensor | None]:
        """Read the exchange's rows, end episodes, and put the result together; the ids whose episode ended, if any."""
        episodes = self._episodes
        episodes.advance(rows)
        reward, terminated, truncated, diverged = self._held.results(rows)
        self._held.hold(rows if diverged is None else rows[~diverged])
        outcome = episodes.finish(rows, reward, terminated, diverged, truncated=truncated)

        info: StepInfo = {}
        ended = to_device(outcome.ended, rows.device)
        ended_ids = rows.index_select(0, ended) if ended.shape[0] else None
        read = rows if wanted is None else rows[wanted[rows]]
        if ended_ids is not None and wanted is not None and self._wants_final_obs:
            read = torch.cat((read, ended_ids)).unique()
        elif ended_ids is not None and not self._wants_final_obs:  # last observations are for those who bootstrap
            read = read[~torch.isin(read, ended_ids)]
        self._draw(rows if self._needs("frames") else read)
        obs = self._shown()
        if ended_ids is not None:
            info = self._end_episodes(ended_ids, None if diverged is None else diverged.index_select(0, ended))
            if self.autoreset == "disabled":
                self._active_set.park(ended_ids)
            elif self._wants_final_obs:
                info["final_obs"] = obs
                info["_final_obs"] = self._make_mask(ended_ids)
        if wanted is not None:
            observed = wanted & self._make_mask(rows)
            info["observed"] = observed if ended_ids is None else observed | self._make_mask(ended_ids)
        return Step(obs, outcome.reward, outcome.terminated, outcome.truncated, info), ended_ids

    def _draw(self, ids: Tensor, among: Tensor | None = None) -> None:
        """Draw what ``ids`` show on demand, or those of them that are ``among`` others and not being reset."""
        if not self._held.late:
            return
        if self._background:
            ids = ids[~torch.isin(ids, torch.tensor(sorted(self._background)))]
        if among is not None and not self._needs("frames"):
            ids = ids[torch.isin(ids, among)]
        if len(stale := self._held.stale(ids)):
            stale = stale.sort().values.unique()
            self._call_backend(lambda: self.backend.observe(stale.tolist()))
            self._held.hold(stale, late=True)
            self.frames_drawn += len(stale) * len(self._held.late)

    def _begin(self, ids: Tensor, episode_ids: Tensor | None) -> None:
        """Start an episode in each of ``ids``, with the given identities or their next ones."""
        self.timer.start("reset")
        seeds = self._next_seeds(ids, episode_ids)
        texts = self._call_backend(lambda: self.backend.reset(ids.tolist(), seeds))
        self._show_begun(ids, texts)
        self.timer.stop()

    def _next_seeds(self, ids: Tensor, episode_ids: Tensor | None) -> list[int]:
        """Count the episodes that begin in ``ids``, with the given identities or their next ones; their seeds."""
        self._episodes.begin(ids, episode_ids)
        return self.seeds_of(self._episodes.seed, self._episodes.episode_ids.index_select(0, ids))

    def _show_begun(self, ids: Tensor, texts: list[str]) -> None:
        """Episodes have begun in ``ids``: show their first observations to callers and observers."""
        if (broken := self._held.not_finite(ids)) is not None:
            bad = ids[broken]
            error = EnvError(
                f"environments {bad.tolist()[:8]} in reset: expected an observation of finite numbers, got NaN, or a "
                f"number that float32 does not hold, in episodes {self._episodes.episode_ids[bad].tolist()[:8]}; mend "
                "the environment: an episode cannot begin so"
            )
            self._fail(error)
            raise error
        self._instruct(ids, texts)
        self._held.hold(ids)
        self._active_set.unpark(ids)
        if self._observers:
            if self._needs("frames"):
                self._draw(ids)
            self._show_reset(ids, ids, self._shown(), states=None)

    def _drop_resets(self) -> None:
        """Wait for the resets that are under way, and forget them, before everything is reset."""
        self.backend.drop_resets()
        self._background.clear()

    def _check_settled(self, call: str, ids: Tensor) -> None:
        """Refuse what cannot be done with environments whose reset is under way."""
        if self._background and (under_way := sorted(self._background.intersection(ids.tolist()))):
            raise LifecycleError(
                f"{call}: environments {under_way[:8]} are being reset; call finish_resets() until they are ready"
            )

    def _end_episodes(self, ended_ids: Tensor, diverged: Tensor | None) -> StepInfo:
        said = self._held.success(ended_ids)
        self._knows_success |= bool((said != NO_SUCCESS_MEASURE).any())
        ends, totals, mask = self._episodes.ends(ended_ids, said == 1 if self._knows_success else None, diverged)
        self.divergences += int(ends.diverged.sum())
        return {"ends": ends, "episode": totals, "_episode": mask}

    def _call_backend(self, call: Callable[[], _T]) -> _T:
        """Require a full reset after a failure or Ctrl-C, which leaves some environments stepped and others not."""
        try:
            return call()
        except BaseException as error:  # also Ctrl-C; raised again
            self._fail(error)
            raise

    def _shown(self) -> Obs:
        return self._held.shown()


def episode_seeds(seed: int, episode_ids: Tensor) -> list[int]:
    """Return the 32-bit seed of each episode: what its environment's ``reset(seed=…)`` is given."""
    bits = rng.random_bits(seed, episode_ids.cpu(), "bridge", 0, 1)[:, 0]
    return (bits & 0xFFFF_FFFF).tolist()


def _picture(env_id: int, drawn: object) -> NDArray[np.uint8]:
    if isinstance(drawn, np.ndarray) and drawn.dtype == np.uint8 and drawn.ndim == 3 and drawn.shape[2] == 3:  # pyright: ignore[reportUnknownMemberType]  # any array
        return cast("NDArray[np.uint8]", drawn)
    got = f"{drawn.dtype} {drawn.shape}" if isinstance(drawn, np.ndarray) else type(drawn).__name__  # pyright: ignore[reportUnknownMemberType]  # any array
    raise EnvError(f"environment {env_id} in render: expected a picture uint8 (H, W, 3), got {got}")


def name_environment(env: gymnasium.Env[Any, Any]) -> str:
    """Return the id of an environment, or its class where it has none."""
    return type(env.unwrapped).__name__ if env.spec is None else env.spec.id
