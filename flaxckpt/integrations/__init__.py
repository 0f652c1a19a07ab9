"""Integrations with other packages; each module imports the package of its name."""
