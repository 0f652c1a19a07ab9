"""numpy's archives of arrays, and their members."""
