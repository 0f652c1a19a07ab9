"""One short program for each kind of training loop: `python -m examples.loops.<name>`.

All but `evaluation` train a small model in one go, and again with the process lost in
the middle, and compare the two. They share `toy`.
"""
