"""Contract tests that a sim, env, bridge, engine or store runs on itself."""
