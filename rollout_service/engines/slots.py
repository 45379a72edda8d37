"""The KV cache of all sequences, and attention over it for a packed batch.

A step computes T new tokens of many sequences in one forward pass of shape [1, T]: nothing is padded in the linear
layers. Only attention knows which token belongs to whom: it is registered with transformers under `ATTENTION`, gets the
step's `StepLayout` through the model's keyword arguments, writes the new keys and values into their slots, and attends
to each sequence's own slot. So the model's code is transformers' own, whatever its architecture.

Slots are rows of one tensor. Sequences that decode one token are attended to in blocks of neighbouring rows, as views:
gathering rows would cost several times the attention itself.
"""

# ruff: noqa: N803, N806, PLR0917 - names carry their shapes, as tokens_BT; all of them are needed

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from turnwire.errors import UnsupportedError

ATTENTION = "turnwire_slots"

IntArray = npt.NDArray[np.int64]


class SlotCache:
    """Keys and values [2 * layers, rows, kv_heads, length, head_dim]; keys of layer i at 2i, its values at 2i + 1.

    Zeros, not left as found: masked places are multiplied by 0, and a stray NaN would survive that. The operating
    system hands out zero pages as they are touched, so unused length costs nothing.
    """

    def __init__(self, layers: int, rows: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype) -> None:
        self.kv_heads, self.length = kv_heads, length
        self.store = torch.zeros(2 * layers, rows, kv_heads, length, head_dim, dtype=dtype)
        self._flat = self.store.view(2 * layers, rows * kv_heads * length, head_dim)
        self._heads = np.arange(kv_heads, dtype=np.int64)

    def write_index(self, rows_T: IntArray, positions_T: IntArray) -> torch.Tensor:
        """int64 [T * kv_heads]: where tokens' keys go in a layer, in the order [T, kv_heads]."""
        index = (rows_T[:, None] * self.kv_heads + self._heads) * self.length + positions_T[:, None]
        return torch.from_numpy(index.reshape(-1))

    def write(self, layer: int, index: torch.Tensor, keys_THD: torch.Tensor, values_THD: torch.Tensor) -> None:
        """Put new keys and values at `write_index`."""
        size = keys_THD.shape[-1]
        self._flat[2 * layer].index_copy_(0, index, keys_THD.reshape(-1, size))
        self._flat[2 * layer + 1].index_copy_(0, index, values_THD.reshape(-1, size))

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a row to another, in all layers."""
        self.store[:, target, :, :count] = self.store[:, source, :, :count]

    def view(self, layer: int, start: int, stop: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, count, D] of rows [start, stop): what is there, not a copy."""
        both = self.store[2 * layer : 2 * layer + 2, start:stop, :, :count]
        return both[0], both[1]


@dataclass(frozen=True)
class Chunk:
    """`count` new tokens of one sequence, packed from `first` on, after `start` tokens that are cached."""

    row: int
    first: int
    start: int
    count: int


class StepLayout:
    """Which packed token belongs to which sequence. Tokens of decoding rows come first, then the chunks.

    `cache` None: nothing is cached, each chunk is a whole sequence (scoring).
    """

    def __init__(
        self,
        cache: SlotCache | None,
        decode_rows: IntArray,
        decode_lengths: IntArray,
        chunks: Sequence[Chunk],
        groups: int,
        dtype: torch.dtype,
    ) -> None:
        """`decode_lengths`: tokens of each decoding sequence, the new one included. `groups`: queries a KV head."""
        self.cache = cache
        self.chunks = chunks
        self.checked = False
        if cache is not None:
            rows = [decode_rows, *(np.full(chunk.count, chunk.row, np.int64) for chunk in chunks)]
            places = [decode_lengths - 1, *(np.arange(c.start, c.start + c.count, dtype=np.int64) for c in chunks)]
            self.index = cache.write_index(np.concatenate(rows), np.concatenate(places))
        self.blocks = _blocks(cache, decode_rows, decode_lengths) if cache is not None and len(decode_rows) else []
        self.chunk_masks = [_chunk_mask(chunk, groups, dtype) for chunk in chunks]

    def attend(self, layer: int, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, scale: float) -> Any:
        """[T, heads, D]: each token over its own sequence up to itself."""
        cache, (heads, size), kv_heads = self.cache, q_THD.shape[1:], k_THD.shape[1]
        parts = []
        if cache is not None:
            cache.write(layer, self.index, k_THD, v_THD)
            for block in self.blocks:
                q = q_THD[block.first : block.last].reshape(-1, kv_heads, heads // kv_heads, size)
                keys, values = cache.view(layer, block.row, block.row + block.last - block.first, block.longest)
                out = F.scaled_dot_product_attention(q, keys, values, attn_mask=block.mask, scale=scale)
                parts.append(out.reshape(-1, heads, size))
        for chunk, mask in zip(self.chunks, self.chunk_masks, strict=True):
            part = slice(chunk.first, chunk.first + chunk.count)
            q = q_THD[part].reshape(chunk.count, kv_heads, heads // kv_heads, size)
            q = q.permute(1, 2, 0, 3).reshape(1, kv_heads, -1, size)
            end = chunk.start + chunk.count
            if cache is None:
                keys, values = (new[part].transpose(0, 1)[None] for new in (k_THD, v_THD))
            else:
                keys, values = cache.view(layer, chunk.row, chunk.row + 1, end)
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
            out = out.reshape(kv_heads, heads // kv_heads, chunk.count, size).permute(2, 0, 1, 3)
            parts.append(out.reshape(chunk.count, heads, size))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class Block:
    """Decoding sequences in neighbouring rows, attended to in one call.

    Packed tokens [first, last), rows from `row` on. longest: tokens of the longest of them. mask [rows, 1, 1, longest];
    None where all are as long.
    """

    first: int
    last: int
    row: int
    longest: int
    mask: torch.Tensor | None


CALL_BYTES = 200_000
"""Keys and values that could be read in the time that one more call of attention takes."""


def _blocks(cache: SlotCache, rows: IntArray, lengths: IntArray) -> list[Block]:
    """Cut decoding rows into blocks: in a block each costs as much as its longest, and each block costs a call."""
    token_bytes = 2 * cache.kv_heads * cache.store.shape[-1] * cache.store.itemsize
    call = CALL_BYTES // token_bytes
    beyond = torch.arange(int(lengths.max())) >= torch.from_numpy(lengths)[:, None]
    masks = torch.zeros(beyond.shape, dtype=cache.store.dtype).masked_fill_(beyond, -torch.inf)
    blocks: list[Block] = []
    first, longest, shortest = 0, int(lengths[0]), int(lengths[0])
    row_list, length_list = rows.tolist(), lengths.tolist()

    def close(last: int) -> None:
        mask = None if shortest == longest else masks[first:last, None, None, :longest]
        blocks.append(Block(first, last, row_list[first], longest, mask))

    for place in range(1, len(row_list)):
        length, count = length_list[place], place - first
        joined = max(longest, length)
        apart = row_list[place] != row_list[place - 1] + 1
        if apart or (count + 1) * joined > count * longest + length + call:
            close(place)
            first, longest, shortest = place, length, length
        else:
            longest, shortest = joined, min(shortest, length)
    close(len(row_list))
    return blocks


def _chunk_mask(chunk: Chunk, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """[groups * count, start + count]: the chunk's queries, once for each query head that shares a KV head."""
    end = chunk.start + chunk.count
    beyond = torch.arange(end) > torch.arange(chunk.start, end)[:, None]
    mask = torch.zeros(chunk.count, end, dtype=dtype).masked_fill_(beyond, -torch.inf)
    return mask if groups == 1 else mask.repeat(groups, 1)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slots: StepLayout,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: query [1, heads, T, D], key and value [1, kv_heads, T, D]."""
    if not slots.checked:
        _check_supported(kwargs)
        slots.checked = True
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q_THD, k_THD, v_THD = (part[0].transpose(0, 1) for part in (query, key, value))
    return slots.attend(int(module.layer_idx), q_THD, k_THD, v_THD, scale)[None], None  # type: ignore[arg-type]


def _check_supported(arguments: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux", "sinks"):
        if arguments.get(name) is not None:
            raise UnsupportedError(f"the transformers engine has no attention with {name}, which this model needs")


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
