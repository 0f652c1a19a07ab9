"""Searches for what tests by example miss; see README.md."""
