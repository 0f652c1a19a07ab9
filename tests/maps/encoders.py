"""Decoders, filled later."""

CASES = ()
