"""The trainer service: owns the policy, its updates, and the runs. Start with `loop.py`."""
