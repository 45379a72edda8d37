"""Messages to tokens, and the bridge from an action to an observation.

Invariant (DESIGN.md 5.3): the tokens between an action and its observation, and between the observation and the next
action, come from the chat template once, at start-up. A template that writes earlier turns differently once later ones
are there is refused, with the reason and the fix: under it, what the policy saw when it sampled would not be what a
later rendering shows.

Text of users and tools cannot forge a role: where a message holds the text of a control token, this text is tokenized
as ordinary characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from rollout_service.engines.base import Ids
from turnwire.errors import ConfigError, InvalidRequestError, Problem

Message = Mapping[str, Any]
"""`role`, and `content`: text, or where there are images among it parts, as templates of models that see take them:
`{"type": "text", "text": …}` and `{"type": "image"}`, for which the template writes the image's placeholder."""

_SENTINELS = ("Qaxvelm", "Ubrontik", "Eolphard", "Yvistrup", "Ganturol", "Wexmidor")
"""Words that stand for contents while the template is looked at. No template and no user writes them."""

_ACTION_SHAPES = (
    "{}",
    "<think>\nidea\n</think>\n\n{}",
    '{}<tool_call>\n{{"name": "x", "arguments": {{}}}}\n</tool_call>',
)
"""Forms of an action that templates are known to rewrite in earlier turns."""


def texts_of(message: Message) -> list[str]:
    """The texts of a message's content."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


FIX = (
    "use a template that renders each message once and for all (chat.template), "
    "another chat.observation_role, or other chat.template_arguments"
)


@dataclass(frozen=True)
class Bridge:
    """Token ids around an observation.

    before: from the end of an action, its end-of-turn token first, to the observation's text. after: from there to
    where the next action begins. end_of_turn: the token that ends an action; None where the template has none.
    """

    before: Ids
    after: Ids
    end_of_turn: int | None

    def around(self, action: Ids, observation: Ids) -> Ids:
        """What follows an action. An end-of-turn token that the policy wrote itself is not doubled."""
        ended = len(action) > 0 and self.end_of_turn is not None and int(action[-1]) == self.end_of_turn
        return np.concatenate([self.before[1:] if ended else self.before, observation, self.after])


class Chat:
    """One tokenizer's chat format. Raises ConfigError if its template cannot be used for turns."""

    def __init__(
        self,
        tokenizer: Any,
        observation_role: str = "tool",
        template: str | None = None,
        template_arguments: Mapping[str, bool | int | str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._role = observation_role
        self._template = template
        self._arguments = dict(template_arguments or {})
        if template is None and not tokenizer.chat_template:
            raise ConfigError([Problem("chat.template", "the model has no chat template; name a Jinja file")])
        self._in_parts = False
        self._in_parts = self._wants_parts()
        before, after = self._find_bridge()
        before_ids = self._encode(before)
        self._controls = self._control_tokens([*before_ids, *self._encode(after)])
        self._control_pattern = re.compile(
            "|".join(map(re.escape, sorted(self._controls.values(), key=len, reverse=True)))
        )
        first = int(before_ids[0]) if len(before_ids) else -1
        self.bridge = Bridge(before_ids, self._encode(after), first if first in self._controls else None)

    # -- in use

    def prompt(self, messages: Sequence[Message]) -> Ids:
        """Token ids of the messages and the beginning of the policy's turn.

        As the template renders them; only contents that hold a control token's text are tokenized apart. Raises
        InvalidRequestError for messages that the template refuses.
        """
        contents: list[str] = []
        shown = [self._guarded(message, contents) for message in messages]
        if not contents:
            return self._encode(self._render_request(messages))
        marker = f"{_SENTINELS[0]}[0-9]+{_SENTINELS[0]}"
        around = re.split(marker, self._render_request(shown))
        if len(around) != len(contents) + 1:
            raise InvalidRequestError(
                "a message holds the text of a control token, and the template shows it more than once"
            )
        parts = [self._encode(around[0])]
        for content, rest in zip(contents, around[1:], strict=True):
            parts += [self.text(content), self._encode(rest)]
        return np.concatenate(parts)

    def text(self, text: str) -> Ids:
        """Token ids of text that is not ours, as an observation, tokenized alone and without control tokens."""
        ids = self._encode(text)
        if not self._forges(text) and not any(token in self._controls for token in ids.tolist()):
            return ids
        pieces = []
        start = 0
        for match in self._control_pattern.finditer(text):
            middle = match.start() + 1  # cut inside the control token's text: neither half is one
            pieces.append(text[start:middle])
            start = middle
        pieces.append(text[start:])
        ids = np.concatenate([self._encode(piece) for piece in pieces])
        return ids[~np.isin(ids, list(self._controls))]  # what even so became one (a normalizer's doing) is dropped

    def decode(self, ids: Ids) -> str:
        """The text of tokens, control tokens and all."""
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def action_text(self, ids: Ids) -> str:
        """The text of an action, without the end-of-turn token."""
        ended = len(ids) > 0 and int(ids[-1]) in self._controls
        return self.decode(ids[:-1] if ended else ids)

    def _guarded(self, message: Message, contents: list[str]) -> Message:
        """The message with a sentinel for each text that forges a control token; these are added to `contents`."""

        def guard(text: str) -> str:
            if not self._forges(text):
                return text
            contents.append(text)
            return f"{_SENTINELS[0]}{len(contents)}{_SENTINELS[0]}"

        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": guard(content)}
        parts = [{**part, "text": guard(part["text"])} if part["type"] == "text" else part for part in content]
        return {**message, "content": parts}

    # -- at start-up

    def _wants_parts(self) -> bool:
        """Whether the template shows nothing of a content that is plain text, and so wants it as a part."""
        try:
            return _SENTINELS[1] not in self._apply([{"role": "user", "content": _SENTINELS[1]}])
        except (jinja2.TemplateError, ValueError, TypeError):
            return False

    def _find_bridge(self) -> tuple[str, str]:
        user, first, second, third, fourth = _SENTINELS[1:6]
        bridges = set()
        for shape in _ACTION_SHAPES:
            action, later = shape.format(first), shape.format(third)
            turns: list[Message] = [{"role": "user", "content": user}, {"role": "assistant", "content": action}]
            turns += [{"role": self._role, "content": second}, {"role": "assistant", "content": later}]
            turns += [{"role": self._role, "content": fourth}]
            prompt = self._render(turns[:1])
            once, twice = self._render(turns[:3]), self._render(turns)
            self._must_extend(prompt, once, "the prompt when an action and its observation follow")
            self._must_extend(once, twice, "an earlier turn when a later one follows")
            for whole, start, said, seen in ((once, prompt, action, second), (twice, once, later, fourth)):
                bridge = self._between(whole[len(start) :], said, seen)
                bridges.add(bridge)
        if len(bridges) != 1:
            self._refuse(f"it joins action and observation in different ways: {sorted(bridges)[:2]}")
        return bridges.pop()

    def _between(self, text: str, action: str, observation: str) -> tuple[str, str]:
        if not text.startswith(action):
            self._refuse(f"it shows the action {action!r} as {text[: len(action) + 20]!r}")
        before, found, after = text[len(action) :].partition(observation)
        if not found:
            self._refuse(f"it does not show the content of a {self._role!r} message")
        return before, after

    def _must_extend(self, start: str, whole: str, what: str) -> None:
        if not whole.startswith(start):
            place = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(whole))
            self._refuse(f"it rewrites {what}: {start[place : place + 40]!r} becomes {whole[place : place + 40]!r}")

    def _refuse(self, reason: str) -> None:
        raise ConfigError([Problem("chat.template", f"this chat template cannot be used for turns: {reason}; {FIX}")])

    def _control_tokens(self, structural: Sequence[int]) -> dict[int, str]:
        """The special tokens, and the added tokens that the template builds turns from: id to text."""
        added = dict(self._tokenizer.added_tokens_decoder)
        chosen = set(self._tokenizer.all_special_ids) | {n for n, token in added.items() if token.special}
        chosen |= set(map(int, structural)) & added.keys()
        return {number: str(added[number]) for number in chosen if number in added}

    def _forges(self, text: str) -> bool:
        return bool(self._controls) and self._control_pattern.search(text) is not None

    def _encode(self, text: str) -> Ids:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self._apply(messages)
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            self._refuse(f"it fails on a conversation of user, assistant and {self._role!r}: {error}")
            raise

    def _render_request(self, messages: Sequence[Message]) -> str:
        try:
            return self._apply(messages)
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}") from error

    def _apply(self, messages: Sequence[Message]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [self._as_wanted(message) for message in messages],
            tokenize=False,
            add_generation_prompt=True,
            chat_template=self._template,
            **self._arguments,
        )
        return text

    def _as_wanted(self, message: Message) -> dict[str, Any]:
        if self._in_parts and isinstance(message["content"], str):
            return {**message, "content": [{"type": "text", "text": message["content"]}]}
        return dict(message)
