"""Stop strings, found as tokens come, without decoding at each token.

A match is completed by a token whose own text holds the last character of some stop string. Only for such a token
is the tail decoded, by the tokenizer itself, and looked at.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

_TAIL_SLACK_TOKENS = 8
"""Tokens decoded beyond one a character, for tokens that have no text of their own."""


class StopTable:
    """Makes matchers for one tokenizer. Not thread-safe: tokenizers are not, so it needs one of its own."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        lead = self._decode(anchor)
        known = min(vocabulary, len(tokenizer))
        texts = tokenizer.batch_decode(
            [[*anchor, token] for token in range(known)], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        self._pieces = [text[len(lead) :] if text.startswith(lead) else text for text in texts]
        self._pieces.extend([""] * (vocabulary - known))
        self.matcher = lru_cache(maxsize=256)(self._matcher)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _matcher(self, strings: tuple[str, ...]) -> StopMatcher:
        last = {text[-1] for text in strings}
        if any(not character.isascii() for character in last):
            last.add("\ufffd")  # part of a character that several tokens spell
        completes = bytearray(any(character in piece for character in last) for piece in self._pieces)
        return StopMatcher(strings, completes, self._decode)


class StopMatcher:
    """`completes[token]` says whether the token can end a stop string; then ask `matches`."""

    def __init__(self, strings: tuple[str, ...], completes: bytearray, decode: Any) -> None:
        self.completes = completes
        self._strings = strings
        self._decode = decode
        self._tail = max(len(text) for text in strings) + _TAIL_SLACK_TOKENS

    def matches(self, generated: npt.NDArray[np.int32]) -> bool:
        """Whether the text of the tokens generated so far ends in, or has just passed, a stop string."""
        tail = self._decode(generated[-self._tail :].tolist())
        return any(text in tail for text in self._strings)
