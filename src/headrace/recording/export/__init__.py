"""Datasets in other formats: HDF5, LeRobot, Minari."""
