"""The loops: collect, evaluate with chunks, the small PPO."""
