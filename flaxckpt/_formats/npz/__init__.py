"""Reader of numpy's archives of arrays (`.npz`)."""
