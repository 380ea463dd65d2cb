"""The Gymnasium ids of our tasks, registered by name so that nothing heavy is imported."""

from __future__ import annotations

from gymnasium.envs.registration import register, registry

ENTRY = "entry:"
FOREIGN = (ENTRY, "tcp://")
"""Before the source of an environment in another interpreter, or at an address of one."""
GYMNASIUM = "gym:"
"""What the source of a bridged Gymnasium environment begins with."""

IDS = {
    "headrace/AlohaInsertion-v0": "aloha-insertion",
    "headrace/AlohaInsertionState-v0": "aloha-insertion-state",
    "headrace/AlohaTransferCube-v0": "aloha-transfer-cube",
    "headrace/AlohaTransferCubeState-v0": "aloha-transfer-cube-state",
    "headrace/Ant-v0": "ant",
    "headrace/Cartpole-v0": "cartpole",
    "headrace/CartpoleCamera-v0": "cartpole-camera",
    "headrace/CartpoleCameraTerms-v0": "cartpole-camera-terms",
    "headrace/CartpoleDiscrete-v0": "cartpole-discrete",
    "headrace/CartpoleTerms-v0": "cartpole-terms",
    "headrace/Humanoid-v0": "humanoid",
    "headrace/InvertedPendulum-v0": "inverted-pendulum",
    "headrace/Pusher-v0": "pusher",
    "headrace/PusherCamera-v0": "pusher-camera",
    "headrace/PusherGoal-v0": "pusher-goal",
    "headrace/PusherSolid-v0": "pusher-solid",
    "headrace/PusherWords-v0": "pusher-words",
}


def register_ids() -> None:
    """Register every id once: ``gymnasium.make(id)`` gives one environment, ``make_vec(id, num_envs=…)`` a batch."""
    for env_id, task in IDS.items():
        if env_id not in registry:
            register(
                env_id,
                entry_point="headrace.envs._numpy_env:make_single",
                vector_entry_point="headrace.envs._numpy_env:make_numpy",
                kwargs={"task": task},
            )
