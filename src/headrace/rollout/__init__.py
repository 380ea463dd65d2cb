"""The loops: collect, evaluate with chunks, imitate, the small PPO."""

from headrace.rollout._act_policy import load_chunk_policy
from headrace.rollout._actor_critic import Policy, SavedPolicy, load_actor_critic, save_actor_critic
from headrace.rollout._cloning import CloneCfg, CloneLoss, CloneTraining, clone
from headrace.rollout._collect import collect
from headrace.rollout._collect_workers import Collector
from headrace.rollout._demonstrations import Demonstrations, load_demonstrations
from headrace.rollout._episode_plan import EpisodePlan
from headrace.rollout._evaluate import evaluate
from headrace.rollout._evaluation import Counters, EpisodeResult, Evaluation, InstructionResult
from headrace.rollout._imitation import record_demonstrations
from headrace.rollout._ppo import PPO, PPOCfg
from headrace.rollout._replay_episode import Difference, Replay, make_replay_env, replay_dataset, replay_episode
from headrace.rollout._words_policy import PusherWordsPolicy

__all__ = [
    "PPO",
    "CloneCfg",
    "CloneLoss",
    "CloneTraining",
    "Collector",
    "Counters",
    "Demonstrations",
    "Difference",
    "EpisodePlan",
    "EpisodeResult",
    "Evaluation",
    "InstructionResult",
    "PPOCfg",
    "Policy",
    "PusherWordsPolicy",
    "Replay",
    "SavedPolicy",
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
