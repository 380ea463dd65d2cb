"""LIBERO's 130 tasks natively: exported once by an interpreter that has LIBERO, played without it."""
