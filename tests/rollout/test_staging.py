"""New weights on their way in: what an engine gets is what was sent, or nothing."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import pytest
import torch
from rollout_harness import Running, rollouts
from safetensors.torch import load_file
from staged import staged
from tiny_models import TINY, make_model
from waiting import eventually

from rollout_service.staging import IncomingWeights, staged_file
from turnwire.errors import InfraError, WrongOrderError
from turnwire.torch_weights import specs_of, weight_tensors, write_file
from turnwire.v1 import rollout_pb2
from turnwire.weights import CorruptTensorError, checksum, chunks

TENSORS = {
    "matrix": torch.randn(700, 1000),
    "empty": torch.zeros(0, 4),
    "half": torch.randn(33, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7, dtype=torch.int64),
}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name])


def parts(size: int = 1 << 20) -> list[rollout_pb2.WeightChunk]:
    return list(chunks([data for _, _, _, data in weight_tensors(TENSORS)], size))


def test_what_comes_in_chunks_is_a_file_that_the_library_reads() -> None:
    with contextlib.closing(staged(TENSORS)) as weights:
        same(load_file(weights.path), TENSORS)
        weights.verify()
        tensors = dict(weights.tensors())
    same(tensors, TENSORS)  # they outlive it


def test_a_file_stays_whatever_becomes_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_file(path, TENSORS)
    weights = staged_file(path)
    assert checksum(weights.specs) == checksum(specs_of(TENSORS))
    path.unlink()
    shared = weights.share()
    weights.close()
    shared.verify()
    same(dict(shared.tensors()), TENSORS)
    shared.close()


def test_a_file_that_was_written_to_is_not_taken_for_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_file(path, TENSORS)
    with contextlib.closing(staged_file(path)) as weights:
        with path.open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"!")
        with pytest.raises(InfraError, match="changed"):
            weights.verify()


def test_a_tensor_that_was_changed_on_its_way_is_refused_with_its_last_byte() -> None:
    incoming = IncomingWeights(specs_of(TENSORS))
    broken = parts()
    broken[1].data = broken[1].data[:-1] + bytes([broken[1].data[-1] ^ 1])
    of_matrix = math.ceil(TENSORS["matrix"].nbytes / len(broken[0].data))
    for part in broken[: of_matrix - 1]:
        incoming.add(part)
    with pytest.raises(CorruptTensorError, match="matrix: CRC-32"):
        incoming.add(broken[of_matrix - 1])
    incoming.close()


def test_chunks_may_hold_several_tensors() -> None:
    whole = b"".join(part.data for part in parts())
    incoming = IncomingWeights(specs_of(TENSORS))
    for offset in range(0, len(whole), 999_983):
        incoming.add(rollout_pb2.WeightChunk(offset=offset, data=whole[offset : offset + 999_983]))
    with contextlib.closing(incoming.finish()) as weights:
        same(dict(weights.tensors()), TENSORS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=TINY)


async def broken_off(running: Running, tensors: dict[str, torch.Tensor], count: int) -> rollout_pb2.PartialUpdate:
    """Send so many chunks of an update to version 1 and break off; what the service then has."""
    update = rollout_pb2.WeightUpdate(version=1, tensors=specs_of(tensors))
    update.stream.SetInParent()
    call = running.client._stub.UpdateWeights()
    await call.write(rollout_pb2.UpdateWeightsRequest(update=update))
    sent = list(chunks([data for _, _, _, data in weight_tensors(tensors)]))[:count]
    for chunk in sent:
        await call.write(rollout_pb2.UpdateWeightsRequest(chunk=chunk))
    wanted = sum(len(chunk.data) for chunk in sent)

    async def all_there() -> bool:
        return (await running.client.get_weight_info()).partial.received_bytes == wanted

    await eventually(all_there)
    call.cancel()
    await eventually(lambda: not running.service._updating)
    return (await running.client.get_weight_info()).partial


async def test_an_update_whose_stream_broke_goes_on_where_it_was(folder: Path) -> None:
    async with rollouts(folder, tools=False) as running:
        tensors = {name: tensor + 0.01 for name, tensor in running.engine._runner.weights.items()}
        partial = await broken_off(running, tensors, 5)
        assert (partial.version, partial.checksum) == (1, checksum(specs_of(tensors)))
        requests = []
        write = running.client._stub.UpdateWeights

        def watched(**options: float) -> object:
            call = write(**options)
            inner = call.write

            async def writing(request: rollout_pb2.UpdateWeightsRequest) -> None:
                requests.append(request)
                await inner(request)

            call.write = writing
            return call

        running.client._stub.UpdateWeights = watched  # type: ignore[method-assign,assignment]
        answer = await running.client.update_weights(weight_tensors(tensors), 1)
        assert answer.checksum == partial.checksum
        assert requests[0].update.stream.offset == partial.received_bytes
        assert sum(len(request.chunk.data) for request in requests) == answer.bytes - partial.received_bytes
        info = await running.client.get_weight_info()
        assert (info.version, info.HasField("partial")) == (1, False)


async def test_a_stream_cannot_go_on_with_what_is_not_there(folder: Path) -> None:
    async with rollouts(folder, tools=False) as running:
        tensors = {name: tensor + 0.01 for name, tensor in running.engine._runner.weights.items()}
        await broken_off(running, tensors, 3)
        for version, offset, found in ((1, 7, "bytes"), (2, 7, "nothing")):
            update = rollout_pb2.WeightUpdate(version=version, tensors=specs_of(tensors))
            update.stream.offset = offset
            call = running.client._stub.UpdateWeights(iter([rollout_pb2.UpdateWeightsRequest(update=update)]))
            with pytest.raises(Exception, match=f"begins at offset 7, but .*{found} of this update is here"):
                await call
        other = {name: tensor + 1 for name, tensor in tensors.items()}
        await running.client.update_weights(weight_tensors(other), 1)  # another update takes its place
        with pytest.raises(WrongOrderError, match="version 1"):
            await running.client.update_weights(weight_tensors(tensors), 1)


async def test_what_came_of_an_update_is_not_kept_for_ever(folder: Path) -> None:
    async with rollouts(folder, tools=False, update_idle_seconds=1) as running:
        tensors = {name: tensor + 0.01 for name, tensor in running.engine._runner.weights.items()}
        await broken_off(running, tensors, 3)

        async def forgotten() -> bool:
            return not (await running.client.get_weight_info()).HasField("partial")

        await eventually(forgotten)
        await running.client.update_weights(weight_tensors(tensors), 1)
