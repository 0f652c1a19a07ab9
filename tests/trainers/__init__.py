"""Checkpoints exchanged with trainers that save with Orbax: `make test-trainers`.

Tunix, MaxText and Kauldron are not in the environment of the other tests, which skips
them. MaxDiffusion and openpi are not in a package index: Orbax writes and reads their
items as they call it.
"""
