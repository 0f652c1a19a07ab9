"""One short program for each kind of training loop: `python -m examples.loops.<name>`.

All but `evaluation` train a small model without an interruption, and again with one,
and compare the results. They share `toy`.
"""
