"""Log lines, as text or as JSON with the ids of what they are about.

A task that works for one trajectory or one run says so once, with `trajectory_id.set(…)` or `run_id.set(…)`: tasks have
contexts of their own, so this holds until the task ends, and in the tasks and threads that it starts.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

from opentelemetry import trace

from turnwire.telemetry.config import LoggingConfig

trajectory_id: ContextVar[str] = ContextVar("trajectory_id", default="")
run_id: ContextVar[str] = ContextVar("run_id", default="")


class _Ids(logging.Filter):
    """Gives each record the ids that hold where it is logged; those that there are."""

    def filter(self, record: logging.LogRecord) -> bool:
        for variable in (trajectory_id, run_id):
            if value := variable.get():
                setattr(record, variable.name, value)
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            record.trace_id = trace.format_trace_id(span.trace_id)
        return True


def configure_logging(config: LoggingConfig = LoggingConfig()) -> None:  # noqa: B008 - frozen
    """Log to stderr, for a service's process."""
    handler = logging.StreamHandler(sys.stderr)
    if config.format == "json":
        from pythonjsonlogger.json import JsonFormatter  # noqa: PLC0415 - only if wanted

        handler.addFilter(_Ids())
        handler.setFormatter(
            JsonFormatter(
                "%(levelname)s %(name)s %(message)s",
                rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
                timestamp="time",
            )
        )
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    logging.basicConfig(handlers=[handler], level=config.level, force=True)
