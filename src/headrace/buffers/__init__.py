"""Ring buffers with one owner: history per environment, delays, the pool of outputs."""
