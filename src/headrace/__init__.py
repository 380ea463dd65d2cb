"""headrace: the data path between batched robot simulation and policy."""
