"""Physics and cameras behind one ``Simulation`` protocol."""
