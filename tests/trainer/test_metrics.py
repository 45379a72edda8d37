"""What a run measures: TensorBoard says what metrics.jsonl says, also after a crash, and GPUs are measured if there are
any. In the same run, weights that go through a file leave none behind.
"""

from __future__ import annotations

import json
import sys
import types
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from services import all_services, finished, last_state, letters_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer_service import publisher
from trainer_service.files import AppendFile
from trainer_service.ledger import audit
from trainer_service.metrics import GpuMeter, MetricsWriter

Series = dict[str, dict[int, float]]


def of_tensorboard(folder: Path) -> Series:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: {item.step: item.value for item in events.Scalars(name)} for name in events.Tags()["scalars"]}


def of_lines(path: Path) -> Series:
    series: Series = defaultdict(dict)
    for entry in map(json.loads, path.read_text().splitlines()):
        prefix, step = ("evaluation/" if entry.pop("kind") == "evaluation" else ""), entry.pop("step")
        del entry["time"]
        for name, value in entry.items():
            if name != "failures":  # texts are in the JSON alone
                series[prefix + name][step] = value
    return series


def same(one: Series, other: Series) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert other[name] == pytest.approx(values, rel=1e-6), name  # an event file has single precision


def left_behind(folder: Path) -> list[Path]:
    return list(folder.glob("**/*-weights-*"))


@pytest.mark.needs("isolated-sandbox")
@pytest.mark.parametrize("way", ["file", "file elsewhere", "shm"])
async def test_a_run_writes_both_and_sends_weights_through_a_file(
    way: str, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        real(path, tensors)
        assert path.stat().st_size > 0
        written.append(path)

    real = publisher.write_file
    monkeypatch.setattr(publisher, "write_file", write_file)
    folder = tmp_path / "runs" / "run"
    exchange = {"file": folder, "file elsewhere": tmp_path / "exchange", "shm": Path("/dev/shm")}[way]
    named = {"folder": str(exchange)} if way == "file elsewhere" else {}
    values = letters_run(
        model_path,
        weights={"transport": way.split(maxsplit=1)[0], **named},
        metrics={"tensorboard": True},
        evaluation={"tasks": 1},
        training={"steps": 2},
        optimizer={"learning_rate": 0.01},
    )
    async with all_services(model_path, tmp_path / "runs") as (client, _):
        events = await finished(client, "run", values)
    assert last_state(events) == ("FINISHED", "")
    assert audit(folder / "ledger.jsonl")["counts"] == {"trained": 32, "evaluated": 6}
    assert [path.parent for path in written] == [exchange] * 3  # at the start, and after each step
    assert len(set(written)) == 3
    assert not any(path.exists() for path in written)
    assert not left_behind(tmp_path)
    metrics = of_lines(folder / "metrics.jsonl")
    assert max(metrics["canary/worst_gap"].values()) < 1e-4  # so the engine did take them from the file
    tensors = load_file(folder / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    assert set(metrics["sync/bytes"].values()) == {sum(tensor.nbytes for tensor in tensors.values())}
    same(metrics, of_tensorboard(folder / "tensorboard"))


def test_tensorboard_forgets_what_a_crash_undid(tmp_path: Path) -> None:
    path, events = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    file = AppendFile(path)
    writer = MetricsWriter(file, events, 0)
    writer.write("evaluation", 0, {"accuracy/a": 0.25}, failures={})
    for step in (1, 2):
        writer.write("step", step, {"loss": step / 10, "only/before": 1.0})
    checkpoint = file.sync()
    writer.write("step", 3, {"loss": 0.3, "only/lost": 1.0})
    writer.close()

    writer = MetricsWriter(AppendFile(path, checkpoint), events, 3)
    for step in (3, 4):
        writer.write("step", step, {"loss": step / 100})
    writer.write("evaluation", 4, {"accuracy/a": 0.75}, failures={})
    writer.close()
    read = of_tensorboard(events)
    assert read.pop("only/lost", {}) == {}
    same(of_lines(path), read)


def fake_pynvml(count: int) -> types.ModuleType:
    """A stand-in for NVML, which needs a GPU: device 0 tells everything, others tell no power."""

    class NVMLError(Exception):
        pass

    def power(handle: int) -> int:
        if handle:
            raise NVMLError("Not Supported")
        return 250_500

    module = types.ModuleType("pynvml")
    vars(module).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=75),
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=3 * 2**30, total=8 * 2**30),
        nvmlDeviceGetPowerUsage=power,
    )
    return module


def test_each_gpu_is_measured_as_far_as_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml(2))
    assert GpuMeter().read() == {
        "gpu/0/utilization": 0.75,
        "gpu/0/memory_gib": 3.0,
        "gpu/0/power_watts": 250.5,
        "gpu/1/utilization": 0.75,
        "gpu/1/memory_gib": 3.0,
    }


def test_without_a_gpu_or_a_driver_or_the_library_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    no_driver = fake_pynvml(0)
    vars(no_driver)["nvmlInit"] = lambda: (_ for _ in ()).throw(no_driver.NVMLError("Driver Not Loaded"))
    for module in (fake_pynvml(0), no_driver, None):  # None: it cannot be imported
        monkeypatch.setitem(sys.modules, "pynvml", module)  # type: ignore[arg-type]
        assert GpuMeter().read() == {}
    assert capfd.readouterr() == ("", "")
