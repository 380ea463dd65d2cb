"""RL libraries over ``BatchEnv``: a folder a library, imported by name when it is used."""
