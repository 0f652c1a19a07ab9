"""Measures flaxckpt beside other checkpointers: `python -m benchmarks --help`."""
