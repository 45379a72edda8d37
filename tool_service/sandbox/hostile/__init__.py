"""The hostile suite: what an agent may try, and that a backend survives it.

One suite for the tests and for a user's own installation (`turnwire sandbox check`). A *row* is a kind of attack
(`rows.py`); a *case* is one program of that kind and its right outcome (`case.py`, and a table a group of rows). The
runner (`runner.py`) takes each case to a fresh sandbox, and afterwards checks what must hold after every one:

1. each turn was answered with a typed result in time;
2. the next call on the trajectory works, or says that the session is lost and then works;
3. a neighbour, asked all the while, gives right answers;
4. no process, mount, folder, descriptor or container is left;
5. memory is back where it was;
6. no secret of the service (in its environment, a file, its memory) is in any output;
7. files and settings of the host are as they were, and nobody has reached the service's sockets;
8. no outcome is a failure of ours, and the outcome under load is the one alone;
9. the pool is back at its size.
"""

from tool_service.sandbox.hostile.case import LIMITS, Case
from tool_service.sandbox.hostile.rows import CASES, ELSEWHERE, GROUPS, ROWS, chosen
from tool_service.sandbox.hostile.runner import Outcome, Report, examine

__all__ = ["CASES", "ELSEWHERE", "GROUPS", "LIMITS", "ROWS", "Case", "Outcome", "Report", "chosen", "examine"]
