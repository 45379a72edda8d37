"""The `sql` tool's PostgreSQL: a database of its own for each trajectory, on a server that trajectories share.

`config.py` says what an operator sets, `walls.py` what keeps a trajectory in its database, `database.py` what happens
to one trajectory, `server.py` what all share, `clones.py` which databases wait for them. `connection.py` speaks the
wire protocol, and says why no driver does.
"""
