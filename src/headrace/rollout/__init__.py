"""The loops: collect, evaluate with chunks, the small PPO."""

from headrace.rollout._act_policy import load_chunk_policy
from headrace.rollout._actor_critic import SavedPolicy, load_actor_critic, save_actor_critic
from headrace.rollout._episode_plan import EpisodePlan
from headrace.rollout._evaluate import evaluate
from headrace.rollout._evaluation import Counters, EpisodeResult, Evaluation
from headrace.rollout._ppo import PPO, PPOCfg

__all__ = [
    "PPO",
    "Counters",
    "EpisodePlan",
    "EpisodeResult",
    "Evaluation",
    "PPOCfg",
    "SavedPolicy",
    "evaluate",
    "load_actor_critic",
    "load_chunk_policy",
    "save_actor_critic",
]
