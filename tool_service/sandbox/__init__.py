"""Sandboxes in which untrusted code runs: one interface (`base`), backends, a warm pool."""

from tool_service.sandbox.base import (
    JSON,
    BackendStats,
    FileRefused,
    PoolExhausted,
    Sandbox,
    SandboxBackend,
    SandboxError,
    SandboxLimits,
    SandboxUnavailable,
    Tier,
    Turn,
    TurnResult,
    TurnStatus,
)
from tool_service.sandbox.pool import PoolStats, WarmPool
from tool_service.sandbox.process import ProcessBackend, ProcessConfig

__all__ = [
    "JSON",
    "BackendStats",
    "FileRefused",
    "PoolExhausted",
    "PoolStats",
    "ProcessBackend",
    "ProcessConfig",
    "Sandbox",
    "SandboxBackend",
    "SandboxError",
    "SandboxLimits",
    "SandboxUnavailable",
    "Tier",
    "Turn",
    "TurnResult",
    "TurnStatus",
    "WarmPool",
]
