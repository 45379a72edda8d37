"""Where tasks come from: `task.py` is the one type, `files.py` and `generators.py` make it,
`dataset.py` mixes and orders.
"""
