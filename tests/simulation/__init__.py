"""A deterministic simulator that runs the production protocol on a simulated clock, network and set of machines."""
