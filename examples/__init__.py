"""Programs to read and to run; their settings are in `configs`."""
