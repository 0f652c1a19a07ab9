"""The run directory on other file systems, from one machine.

    python -m verification filesystems [KIND...]

Needs root. Each kind is mounted at two places, as two machines would do it; what this
kernel or this machine lacks is printed with the reason.
"""
