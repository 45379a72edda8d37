"""Engines: `base.py` is the protocol; each other module is one engine or a part of it."""
