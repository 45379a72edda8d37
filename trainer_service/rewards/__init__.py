"""Rewards: `base.py` says what one is, each other file without an underscore is one, `registry.py` finds them."""
