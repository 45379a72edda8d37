"""What a hostile case on a PostgreSQL server is made of: statements, and how each may end."""

from dataclasses import dataclass

ERROR, TIMEOUT, MEMORY, LOST = "TOOL_ERROR", "TIMEOUT", "MEMORY", "SESSION_LOST"
DENIED = "permission denied"


@dataclass(frozen=True)
class Step:
    """A statement, how it may end, and what the agent reads of it."""

    statement: str
    ends: tuple[str, ...]
    shows: str = ""

    @property
    def seconds(self) -> int:
        """Its deadline: short only where that may be its end, so that load changes no outcome."""
        return 3 if TIMEOUT in self.ends else 60


def ok(statement: str, shows: str = "") -> Step:
    return Step(statement, ("",), shows)


def no(statement: str, shows: str = "", *ends: str) -> Step:
    return Step(statement, ends or (ERROR,), shows)


def denied(*statements: str) -> tuple[Step, ...]:
    return tuple(no(statement, DENIED) for statement in statements)


def mixed(*statements: str) -> tuple[Step, ...]:
    """Each ends as it may, but as the agent's own doing."""
    return tuple(Step(statement, ("", ERROR, MEMORY)) for statement in statements)
