"""Random kills of real processes with local directories and copies at peers."""
