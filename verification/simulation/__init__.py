"""Simulation: one seed is one history of several processes, storage and faults."""
