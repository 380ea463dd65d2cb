"""headrace: the data path between batched robot simulation and policy.

Importing it registers the Gymnasium ids (``headrace/Ant-v0``, …) and does nothing else: heavy libraries load on use.
The packages have export lists of their own: ``headrace.envs``, ``headrace.replay``, ``headrace.evaluation``, …
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._gymnasium_ids import register_ids
from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace import bench as bench
    from headrace import bridges as bridges
    from headrace import compat as compat
    from headrace import envs as envs
    from headrace import evaluation as evaluation
    from headrace import history as history
    from headrace import imitation as imitation
    from headrace import learning as learning
    from headrace import libraries as libraries
    from headrace import policies as policies
    from headrace import recording as recording
    from headrace import replay as replay
    from headrace import sim as sim
    from headrace import testing as testing
    from headrace import viewing as viewing
    from headrace._kernels.threads import kernel_threads as kernel_threads
    from headrace._kernels.threads import set_kernel_threads as set_kernel_threads
    from headrace.bench.benchmark import RunCfg as RunCfg
    from headrace.bench.comparing import compare as compare
    from headrace.bench.measured.play import play as play
    from headrace.bench.measured.train import train as train
    from headrace.bridges.make import bridge as bridge
    from headrace.envs.batch_env import BatchEnv as BatchEnv
    from headrace.envs.recipe import EnvRecipe as EnvRecipe
    from headrace.envs.registry import TaskEntry as TaskEntry
    from headrace.envs.registry import make as make
    from headrace.envs.registry import register_task as register_task
    from headrace.envs.registry import task_names as task_names
    from headrace.envs.task import Rows as Rows
    from headrace.envs.task import Task as Task
    from headrace.envs.task import TaskCfg as TaskCfg
    from headrace.envs.term_task import TermTask as TermTask
    from headrace.envs.term_task import TermTaskCfg as TermTaskCfg
    from headrace.evaluation.evaluating import evaluate as evaluate
    from headrace.policies.load_policy import load_policy as load_policy
    from headrace.types import EpisodeEnds as EpisodeEnds
    from headrace.types import StackSpec as StackSpec
    from headrace.types import Step as Step

__version__ = "0.3.0"

__getattr__, __dir__ = lazy_exports(__name__, __file__)

register_ids()
