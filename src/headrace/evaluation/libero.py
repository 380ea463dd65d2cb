"""LIBERO's suites, and the conventions of the loops that people report with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from headrace.envs.recipe import EnvRecipe, SimName, check_count
from headrace.envs.tasks.libero.names import HORIZONS, check_perturbations, libero_names, split_name
from headrace.errors import UnknownNameError
from headrace.evaluation._result import Evaluation
from headrace.evaluation.cfg import PlayCfg
from headrace.evaluation.evaluating import evaluate
from headrace.evaluation.suites import SuiteTask
from headrace.policies.observation_map import ObservationMap
from headrace.sim.mujoco_api import mujoco

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.evaluation.player import PolicySource

_PICTURES = {"agentview": "image", "robot0_eye_in_hand": "wrist_image"}


@dataclass(frozen=True, kw_only=True)
class LiberoProtocol:
    """What an evaluation loop does beside the policy."""

    horizons: Mapping[str, int]
    """Suite → steps of an episode, without the waits."""
    mapping: ObservationMap
    """Names, sizes and orientation of what the policy reads; our pictures are upright, LIBERO's are upside down."""
    waits: int = 10
    execute: int | None = None
    """Actions executed of each chunk; None for all."""
    pixels: int = 256
    gripper: str = "signed"
    """``signed``: positive closes; ``unit``: in [0, 1], 1 opens."""
    deviates: str = ""
    """How the native tasks differ from the loop, in words; "" where they do not."""


def _map(pictures: Mapping[str, str], state: str, prompt: str, **changes: Any) -> ObservationMap:
    keys = {key: group for group, key in pictures.items()}
    # a picture turned by 180 degrees from upside down is upright and mirrored
    return ObservationMap(keys={**keys, state: "policy"}, prompt=prompt, flips=("columns",), **changes)


_SENT = (224, 224)
_OPENPI = {group: f"observation/{key}" for group, key in _PICTURES.items()}
_LEROBOT = {"agentview": "observation.images.image", "robot0_eye_in_hand": "observation.images.image2"}
_GROOT = {group: f"video.{key}" for group, key in _PICTURES.items()}
_OFT = {"agentview": "full_image", "robot0_eye_in_hand": "wrist_image"}
PROTOCOLS: Mapping[str, LiberoProtocol] = {
    "openpi": LiberoProtocol(
        horizons=HORIZONS, execute=5, mapping=_map(_OPENPI, "observation/state", "prompt", image_size=_SENT)
    ),
    "oft": LiberoProtocol(
        horizons=HORIZONS,
        execute=8,
        gripper="unit",
        mapping=_map(_OFT, "state", "instruction", jpeg=95, image_size=_SENT, resize="lanczos", crop=0.9),
        deviates="JPEG files are read with the accurate transform, where TensorFlow takes the fast one",
    ),
    "lerobot": LiberoProtocol(
        horizons={**HORIZONS, "libero_spatial": 280},
        pixels=360,
        mapping=_map(_LEROBOT, "observation.state", "task"),
        deviates="LeRobot takes the next initial state at every reset; here episode i takes the i-th",
    ),
    "groot": LiberoProtocol(
        horizons=dict.fromkeys(HORIZONS, 720),
        waits=0,
        execute=8,
        gripper="unit",
        mapping=_map(_GROOT, "state.state", "annotation.human.action.task_description"),
        deviates="GR00T's loop places objects at random and observes one physics step later; here episode i takes the "
        "i-th initial state",
    ),
    "vla-eval": LiberoProtocol(horizons=HORIZONS, mapping=_map(_OPENPI, "observation/state", "prompt")),
}
"""By the name of the loop. RLinf's trains on all 500 states and is none of them."""


def libero_protocol(name: str) -> LiberoProtocol:
    """Return a protocol by name."""
    if name not in PROTOCOLS:
        raise UnknownNameError("protocol", name, list(PROTOCOLS))
    return PROTOCOLS[name]


def libero_suite(
    suite: str, protocol: str = "openpi", trials: int = 50, perturb: Sequence[str] = ()
) -> tuple[SuiteTask, ...]:
    """Return a suite of LIBERO as rows for :func:`headrace.evaluate_suite`.

    Protocol and version of MuJoCo are settings of every task, so that they are part of its table's identity: tables of
    different ones are not merged.

    Args:
        suite: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10`` or ``libero_90``.
        protocol: a name of ``PROTOCOLS``.
        trials: episodes per task; episode i takes the i-th of 50 initial states.
        perturb: what differs from the benchmark: camera, light, texture, init, instruction.
    """
    rules, names = libero_protocol(protocol), libero_names(suite)
    check_count("trials", trials)
    check_perturbations(perturb)
    settings: dict[str, object] = {
        "protocol": protocol,
        "mujoco": str(mujoco.__version__),
        "waits": rules.waits,
        "pixels": rules.pixels,
        "gripper": rules.gripper,
        "episode_length": rules.horizons[suite],
        **({"perturb": list(perturb)} if perturb else {}),
    }
    return tuple(
        SuiteTask(
            task=name, name=name.replace("/", "-"), overrides=settings, instruction=None, episodes=trials, seeds=(0,)
        )
        for name in names
    )


@dataclass(frozen=True, kw_only=True)
class SimComparison:
    """The same episodes of a task in several simulations."""

    task: str
    tables: Mapping[str, Evaluation]
    """By ``sim``."""

    @property
    def disagreements(self) -> tuple[int, ...]:
        """Return the episodes that succeed in some of the simulations and not in others."""
        outcomes = [{row.episode_id: row.success for row in table.episodes} for table in self.tables.values()]
        return tuple(i for i in outcomes[0] if len({found.get(i) for found in outcomes}) > 1)

    @property
    def largest_shift(self) -> int | None:
        """Return the largest difference between steps of success; None where no episode succeeds everywhere."""
        lengths = [{row.episode_id: row.length for row in t.episodes if row.success} for t in self.tables.values()]
        common = set(lengths[0]).intersection(*lengths[1:])
        spans = [[found[i] for found in lengths] for i in common]
        return max((max(span) - min(span) for span in spans), default=None)

    def summary(self) -> Table:
        """Return a table with a row per simulation."""
        from rich.table import Table

        shift = "–" if self.largest_shift is None else f"{self.largest_shift} steps"
        caption = f"{len(self.disagreements)} episodes with different outcomes {list(self.disagreements)[:8]}; "
        table = Table(title=self.task, caption=f"{caption}steps of success differ by at most {shift}")
        for column in ("sim", "episodes", "success", "mean length", "seconds"):
            table.add_column(column, justify="left" if column == "sim" else "right")
        for sim, found in self.tables.items():
            won = sum(bool(row.success) for row in found.episodes)
            length = "–" if found.mean_length is None else f"{found.mean_length:.1f}"
            table.add_row(sim, f"{len(found.episodes)}", f"{won}", length, f"{found.counters.seconds:.1f}")
        return table


def compare_sims(
    task: str,
    policy: PolicySource,
    sims: Sequence[str] = ("mujoco", "robosuite"),
    *,
    episodes: int = 50,
    num_envs: int = 1,
    overrides: Mapping[str, object] | None = None,
    play: PlayCfg = PlayCfg(),
) -> SimComparison:
    """Play the same episodes of a task of LIBERO in several simulations.

    Initial states and fixtures are equal in all of them; pictures are drawn by each one's own renderer.

    Args:
        task: ``libero_spatial/0``, …
        policy: as for :func:`headrace.evaluate`.
        sims: ``mujoco`` (native), ``robosuite`` (genuine LIBERO), ``mujoco-3.3`` (the plain reference in its MuJoCo).
        episodes: how many, from 0.
        num_envs: environments in each batch.
        overrides: settings of the task.
        play: how the policy is played.
    """
    split_name(task)
    recipes = {
        sim: EnvRecipe(task, num_envs=num_envs, overrides=overrides or {}, sim=cast("SimName", sim)) for sim in sims
    }
    tables = {sim: evaluate(recipe, policy, episodes=episodes, play=play) for sim, recipe in recipes.items()}
    return SimComparison(task=task, tables=tables)
