"""The loops: collect, evaluate with chunks, the small PPO."""

from headrace.rollout.act_policy import load_chunk_policy
from headrace.rollout.episode_plan import EpisodePlan
from headrace.rollout.evaluate import evaluate
from headrace.rollout.evaluation import Counters, EpisodeResult, Evaluation

__all__ = ["Counters", "EpisodePlan", "EpisodeResult", "Evaluation", "evaluate", "load_chunk_policy"]
