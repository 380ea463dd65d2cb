"""The loops: collect, evaluate with chunks, imitate, the small PPO."""

from headrace.rollout._act_policy import load_chunk_policy
from headrace.rollout._actor_critic import Policy, load_actor_critic, save_actor_critic
from headrace.rollout._cloning import CloneCfg, clone
from headrace.rollout._collect import collect
from headrace.rollout._collect_workers import Collector
from headrace.rollout._demonstrations import Demonstrations, load_demonstrations
from headrace.rollout._evaluate import evaluate
from headrace.rollout._evaluation import EpisodeResult, Evaluation
from headrace.rollout._imitation import record_demonstrations
from headrace.rollout._ppo import PPO, PPOCfg
from headrace.rollout._replay_episode import make_replay_env, replay_dataset, replay_episode
from headrace.rollout._words_policy import PusherWordsPolicy

__all__ = [
    "PPO",
    "CloneCfg",
    "Collector",
    "Demonstrations",
    "EpisodeResult",
    "Evaluation",
    "PPOCfg",
    "Policy",
    "PusherWordsPolicy",
    "clone",
    "collect",
    "evaluate",
    "load_actor_critic",
    "load_chunk_policy",
    "load_demonstrations",
    "make_replay_env",
    "record_demonstrations",
    "replay_dataset",
    "replay_episode",
    "save_actor_critic",
]
