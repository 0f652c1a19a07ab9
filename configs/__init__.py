"""Settings of the programs in `examples`."""
