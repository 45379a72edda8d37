"""What every engine refuses before it computes anything."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rollout_service.engines.base import GenerateJob, Ids
from rollout_service.media import check_images
from turnwire.config import nearest
from turnwire.errors import InvalidRequestError


def check_job(
    job: GenerateJob,
    longest: int,
    vocabulary: int,
    adapters: Collection[str] = (),
    modalities: Sequence[str] = ("text",),
) -> None:
    """Raises InvalidRequestError for a job that no model of this longest sequence, vocabulary, adapters and modalities
    can do."""
    size = len(job.prompt)
    if not 1 <= size < longest:
        raise InvalidRequestError(f"the prompt has {size} tokens; it must have at least 1 and leave room in {longest}")
    _check_ids(job.prompt, vocabulary)
    if job.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1")
    if any(not text for text in job.stop_strings):
        raise InvalidRequestError("a stop string is empty")
    check_adapter(job.adapter, adapters)
    check_images(job.images, modalities)


def check_adapter(name: str, adapters: Collection[str]) -> None:
    """Raises InvalidRequestError for an adapter that is not there. Empty: none is asked for."""
    if name and not adapters:
        raise InvalidRequestError(
            f"there is no adapter {name!r}: this engine has none; engine.vllm.adapters names those of the engine vllm"
        )
    if name and name not in adapters:
        raise InvalidRequestError(f"unknown adapter {name!r}; {nearest(name, list(adapters))}")


def check_sequences(sequences: Sequence[Ids], longest: int, vocabulary: int) -> None:
    """Raises InvalidRequestError for sequences that cannot be scored."""
    for sequence in sequences:
        if not 1 <= len(sequence) <= longest:
            raise InvalidRequestError(f"a sequence has {len(sequence)} tokens, not 1 to {longest}")
        _check_ids(sequence, vocabulary)


def _check_ids(ids: Ids, vocabulary: int) -> None:
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise InvalidRequestError(f"token ids must be in [0, {vocabulary})")
