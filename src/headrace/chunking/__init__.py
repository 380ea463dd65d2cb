"""Action chunks: cursors, admission rules, inference engines, ensembling."""
