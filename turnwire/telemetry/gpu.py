"""What the machine's GPUs are doing, through NVML. Without a GPU, a driver or the library there is nothing to read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

_FIGURES: dict[str, Callable[[Any, Any], float]] = {
    "utilization_ratio": lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    "memory_used_bytes": lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
    "memory_size_bytes": lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).total,
    "power_watts": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
}

FIGURES = {
    "utilization_ratio": "Share of time in which a kernel ran.",
    "memory_used_bytes": "Memory in use.",
    "memory_size_bytes": "Memory that there is.",
    "power_watts": "Power drawn.",
}
"""What is read of a device."""


class Gpus:
    """The machine's devices."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        try:
            import pynvml  # noqa: PLC0415 - optional
        except ImportError:
            return
        self._nvml = pynvml
        with contextlib.suppress(pynvml.NVMLError):  # no driver: no GPU
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def read(self) -> list[dict[str, float]]:
        """By device, its figures of now. What a device does not tell is left out."""
        return [self._read(handle) for handle in self._handles]

    def _read(self, handle: Any) -> dict[str, float]:
        figures = {}
        for name, figure in _FIGURES.items():
            with contextlib.suppress(self._nvml.NVMLError):
                figures[name] = float(figure(self._nvml, handle))
        return figures
