"""`python -m flaxckpt` is the command `flaxckpt`."""

from flaxckpt.cli import main

main()
