"""Changes the code that keeps promises, and asks whether a test notices.

Cosmic Ray makes the mutants, with two operators of `operators`; `mutations` says which
are left out. `runner` runs, in a fork that has imported jax, the tests that reach the
changed statement, from quick to slow. `survivors.toml` lists the mutants that no test
kills, and why.
"""
