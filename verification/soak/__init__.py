"""A day of saves in minutes: nothing may grow, and nothing may be left.

    python -m verification soak --saves 5000 --restores 500

Small states, with retention, staging, two readers, overwrites, pins and metrics.
"""
