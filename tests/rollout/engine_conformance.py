"""The cases every engine must pass: what `rollout_service.engines.base` says, one test each.

A module of tests for an engine subclasses `EngineConformance` and gives three fixtures: `folder` (a model folder),
`engine` (started, on that model), and it inherits `reference` (plain forward passes of the same model).
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_reference import TOLERANCE, Reference
from staged import staged
from tiny_models import make_tokenizer
from waiting import eventually

from rollout_service.engines.base import (
    Engine,
    GenerateDelta,
    GenerateJob,
    GenerateStop,
    Ids,
    Sampling,
    UpdateMode,
)
from turnwire.errors import InvalidRequestError, WrongOrderError
from turnwire.torch_weights import specs_of

SAMPLINGS = {
    "plain": Sampling(seed=11),
    "hot": Sampling(temperature=1.7, seed=12),
    "cold": Sampling(temperature=0.4, seed=13),
    "top_p": Sampling(top_p=0.7, seed=14),
    "top_k": Sampling(top_k=5, seed=15),
    "all": Sampling(temperature=0.8, top_p=0.85, top_k=12, seed=16),
    "narrow": Sampling(top_p=1e-6, seed=17),
}


def ids(size: int, seed: int = 0, vocabulary: int = 380) -> Ids:
    """A prompt of random tokens."""
    return np.random.default_rng(seed).integers(5, vocabulary, size).astype(np.int32)


async def collect(engine: Engine, job: GenerateJob) -> GenerateDelta:
    """All deltas of a request as one, checked for what holds of every answer."""
    deltas = [delta async for delta in engine.generate(job)]
    assert [delta.stop is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    whole = GenerateDelta(
        np.concatenate([delta.token_ids for delta in deltas]),
        np.concatenate([delta.logprobs for delta in deltas]),
        tuple(span for delta in deltas for span in delta.spans),
        deltas[-1].stop,
    )
    assert len(whole.token_ids) == len(whole.logprobs) >= 1
    assert [0, *(span.end for span in whole.spans)] == [*(span.start for span in whole.spans), len(whole.token_ids)]
    return whole


def job(name: str, prompt: Ids, max_tokens: int, sampling: Sampling | None = None, **fields: Any) -> GenerateJob:
    return GenerateJob(name, prompt, max_tokens, sampling or Sampling(seed=1), **fields)


async def update(engine: Engine, tensors: dict[str, torch.Tensor], version: int, mode: UpdateMode) -> float:
    with contextlib.closing(staged(tensors)) as weights:
        return await engine.apply_weights(weights, version, mode)


async def until_tokens(engine: Engine, count: int) -> None:
    """Wait until the engine has generated so many more tokens."""
    goal = engine.info().tokens_generated + count
    await eventually(lambda: engine.info().tokens_generated >= goal, pause=0.001)


class EngineConformance:
    block_tokens = 1
    """A cache that is kept in blocks answers for whole ones alone."""

    @pytest.fixture
    def reference(self, folder: Path) -> Reference:
        return Reference(folder)

    @pytest.mark.parametrize("name", SAMPLINGS)
    async def test_logprobs_are_those_of_a_fresh_pass(self, engine: Engine, reference: Reference, name: str) -> None:
        prompt = ids(23)
        answer = await collect(engine, job("a", prompt, 40, SAMPLINGS[name]))
        assert answer.stop is GenerateStop.LENGTH
        assert len(answer.token_ids) == 40
        reference.check(prompt, answer.token_ids, answer.logprobs, SAMPLINGS[name], answer.spans)

    async def test_logprobs_hold_for_a_mixed_batch(self, engine: Engine, reference: Reference) -> None:
        names = list(SAMPLINGS)
        prompts = [ids(3 + 7 * number % 60, number) for number in range(24)]
        samplings = [SAMPLINGS[names[number % len(names)]] for number in range(24)]
        answers = await asyncio.gather(
            *(
                collect(engine, job(str(n), prompt, 5 + n % 13, sampling))
                for n, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
            )
        )
        for prompt, sampling, answer in zip(prompts, samplings, answers, strict=True):
            reference.check(prompt, answer.token_ids, answer.logprobs, sampling, answer.spans)

    async def test_greedy_takes_the_most_likely_token(self, engine: Engine, reference: Reference) -> None:
        prompt = ids(9)
        answer = await collect(engine, job("a", prompt, 20, Sampling(temperature=0.0)))
        logits = reference.logits(np.concatenate([prompt, answer.token_ids]))
        assert answer.token_ids.tolist() == logits[8:-1].argmax(-1).tolist()
        assert not answer.logprobs.any()

    async def test_sampling_follows_the_distribution(self, engine: Engine, reference: Reference) -> None:
        prompt, sampling = ids(6), Sampling(top_k=6)
        answers = await asyncio.gather(*(collect(engine, job(str(n), prompt, 1, sampling)) for n in range(1200)))
        seen = np.bincount([int(answer.token_ids[0]) for answer in answers], minlength=8) / 1200
        wanted = reference.logprobs(prompt, sampling)[-1].exp().numpy()
        assert np.abs(seen - wanted[: len(seen)]).max() < 0.06

    async def test_seed_gives_the_same_tokens_in_any_company(self, engine: Engine) -> None:
        prompt, sampling = ids(17), Sampling(temperature=1.2, top_p=0.95, seed=99)
        alone = await collect(engine, job("alone", prompt, 30, sampling))
        crowd = [collect(engine, job(f"c{n}", ids(4 + n * 3 % 50, n), 5 + n, Sampling(seed=n))) for n in range(20)]
        together, *_ = await asyncio.gather(collect(engine, job("again", prompt, 30, sampling)), *crowd)
        assert together.token_ids.tolist() == alone.token_ids.tolist()
        other = await collect(engine, job("other", prompt, 30, Sampling(temperature=1.2, top_p=0.95, seed=100)))
        assert other.token_ids.tolist() != alone.token_ids.tolist()

    async def test_without_a_seed_answers_differ(self, engine: Engine) -> None:
        first, second = [await collect(engine, job("a", ids(5), 20, Sampling())) for _ in range(2)]
        assert first.token_ids.tolist() != second.token_ids.tolist()

    async def test_streaming_gives_the_same_in_pieces(self, engine: Engine) -> None:
        whole = await collect(engine, job("a", ids(8), 12))
        pieces = [delta async for delta in engine.generate(job("b", ids(8), 12, stream=True))]
        assert len(pieces) > 1
        assert np.concatenate([piece.token_ids for piece in pieces]).tolist() == whole.token_ids.tolist()

    async def test_growing_sequence_computes_only_what_is_new(self, engine: Engine, reference: Reference) -> None:
        tokens, before = ids(40), engine.info().tokens_prefilled
        for turn in range(6):
            sampling = Sampling(temperature=0.9, seed=turn)
            answer = await collect(engine, job(f"t{turn}", tokens, 7, sampling, sequence_key="trajectory"))
            reference.check(tokens, answer.token_ids, answer.logprobs, sampling, answer.spans)
            tokens = np.concatenate([tokens, answer.token_ids, ids(11, 50 + turn)])
        engine.release("trajectory")
        assert engine.info().tokens_prefilled - before <= 40 + 5 * (11 + self.block_tokens)

    async def test_prompt_that_departs_from_its_key_is_computed_right(
        self, engine: Engine, reference: Reference
    ) -> None:
        prompt = ids(30)
        await collect(engine, job("a", prompt, 10, sequence_key="k"))
        for other in (np.concatenate([prompt[:20], ids(15, 7)]), prompt[:12], ids(25, 8)):
            answer = await collect(engine, job("b", other, 10, Sampling(seed=5), sequence_key="k"))
            reference.check(other, answer.token_ids, answer.logprobs, Sampling(), answer.spans)

    async def test_group_shares_its_prompt(self, engine: Engine, reference: Reference) -> None:
        prompt, before = ids(100, 3), engine.info().tokens_prefilled
        answers = await asyncio.gather(*(collect(engine, job(f"g{n}", prompt, 9, Sampling(seed=n))) for n in range(8)))
        for answer in answers:
            reference.check(prompt, answer.token_ids, answer.logprobs, Sampling(), answer.spans)
        assert len({tuple(answer.token_ids) for answer in answers}) > 1
        assert engine.info().tokens_prefilled - before < 100 * 3

    async def test_stops_at_the_end_of_turn(self, engine: Engine, reference: Reference) -> None:
        free = await collect(engine, job("a", ids(12), 40))
        last = int(free.token_ids[17])
        first = free.token_ids.tolist().index(last)
        answer = await collect(engine, job("b", ids(12), 40, stop_token_ids=frozenset([last])))
        assert answer.stop is GenerateStop.END_OF_TURN
        assert answer.token_ids.tolist() == free.token_ids.tolist()[: first + 1]

    async def test_stops_at_a_string_that_several_tokens_spell(self, engine: Engine) -> None:
        tokenizer = make_tokenizer()
        free = await collect(engine, job("a", ids(12), 60, Sampling(top_k=40, seed=3)))
        pieces = [tokenizer.decode([token]) for token in free.token_ids]
        place = next(n for n in range(5, 59) if pieces[n] and pieces[n + 1] and (pieces[n] + pieces[n + 1]).isascii())
        text = pieces[place][-1] + pieces[place + 1][0]
        ends = next(n for n in range(60) if text in tokenizer.decode(free.token_ids[: n + 1]))
        answer = await collect(
            engine, job("b", ids(12), 60, Sampling(top_k=40, seed=3), stop_strings=("never so", text))
        )
        assert answer.stop is GenerateStop.STRING
        assert answer.token_ids.tolist() == free.token_ids.tolist()[: ends + 1]

    async def test_stops_at_the_longest_sequence(self, engine: Engine) -> None:
        longest = engine.info().max_model_tokens
        answer = await collect(engine, job("a", ids(longest - 5), 100))
        assert (answer.stop, len(answer.token_ids)) == (GenerateStop.LENGTH, 5)
        with pytest.raises(InvalidRequestError, match="tokens"):
            await collect(engine, job("b", ids(longest), 1))

    @pytest.mark.parametrize(
        "bad",
        [
            GenerateJob("x", np.zeros(0, np.int32), 5),
            GenerateJob("x", np.array([-1], np.int32), 5),
            GenerateJob("x", np.array([10**6], np.int32), 5),
            GenerateJob("x", ids(4), 0),
            GenerateJob("x", ids(4), 5, stop_strings=("",)),
        ],
    )
    async def test_refuses_what_cannot_be(self, engine: Engine, bad: GenerateJob) -> None:
        with pytest.raises(InvalidRequestError):
            await collect(engine, bad)

    async def test_scores_at_temperature_one(self, engine: Engine, reference: Reference) -> None:
        sequences = [ids(size, size) for size in (1, 2, 37, 64, 9)]
        result = await engine.score(sequences)
        assert result.version == 0
        for sequence, scored in zip(sequences, result.logprobs, strict=True):
            rows = reference.logprobs(sequence, Sampling())
            wanted = [float(rows[t - 1, sequence[t]]) for t in range(1, len(sequence))]
            np.testing.assert_allclose(scored, np.array(wanted, np.float32), atol=TOLERANCE, rtol=0)

    async def test_pause_holds_and_resume_goes_on(self, engine: Engine) -> None:
        alone = await collect(engine, job("a", ids(10), 160))
        running = asyncio.create_task(collect(engine, job("b", ids(10), 160)))
        await until_tokens(engine, 10)
        await engine.pause()
        assert engine.info().paused
        held = engine.info().tokens_generated
        await asyncio.sleep(0.05)
        assert engine.info().tokens_generated == held
        assert not running.done()
        await engine.resume()
        assert (await running).token_ids.tolist() == alone.token_ids.tolist()

    async def test_cancelled_request_makes_room(self, engine: Engine) -> None:
        running = asyncio.create_task(collect(engine, job("a", ids(10), 200)))
        await until_tokens(engine, 5)
        running.cancel()
        await asyncio.wait([running])
        await eventually(lambda: not engine.info().running)
        assert (await collect(engine, job("b", ids(10), 5))).stop is GenerateStop.LENGTH

    @pytest.mark.parametrize("mode", list(UpdateMode))
    async def test_update_amid_64_requests_loses_none(
        self, engine: Engine, reference: Reference, mode: UpdateMode
    ) -> None:
        prompts = [ids(5 + n % 40, n) for n in range(64)]
        samplings = [Sampling(temperature=0.7 + 0.01 * n, top_p=0.95, seed=n) for n in range(64)]
        running = [
            asyncio.create_task(collect(engine, job(str(n), prompts[n], 30 + n % 20, samplings[n]))) for n in range(64)
        ]
        await until_tokens(engine, 600)
        await update(engine, reference.perturbed(7), 7, mode)
        after = await collect(engine, job("after", ids(8), 10, Sampling(seed=1)))
        answers = await asyncio.gather(*running)
        assert [span.version for span in after.spans] == [7]
        versions = [tuple(span.version for span in answer.spans) for answer in answers]
        if mode is UpdateMode.KEEP:
            assert (0, 7) in versions
        else:
            assert set(versions) <= {(0,), (7,)}
        for number, answer in enumerate(answers):
            assert len(answer.token_ids) == 30 + number % 20
            reference.check(prompts[number], answer.token_ids, answer.logprobs, samplings[number], answer.spans)

    async def test_update_between_turns_of_a_sequence(self, engine: Engine, reference: Reference) -> None:
        tokens = ids(20)
        for turn in range(3):
            answer = await collect(engine, job("a", tokens, 8, Sampling(seed=turn), sequence_key="k"))
            assert [span.version for span in answer.spans] == [turn]
            reference.check(tokens, answer.token_ids, answer.logprobs, Sampling(), answer.spans)
            tokens = np.concatenate([tokens, answer.token_ids, ids(5, turn)])
            await update(engine, reference.perturbed(turn + 1), turn + 1, UpdateMode.KEEP)
        info = await engine.weight_info()
        assert info.version == 3
        assert [spec.crc32 for spec in info.specs] == [spec.crc32 for spec in specs_of(reference.weights[3])]

    async def test_twice_updated_in_one_request(self, engine: Engine, reference: Reference) -> None:
        prompt = ids(10)
        running = asyncio.create_task(collect(engine, job("a", prompt, 200, Sampling(seed=4))))
        for version in (3, 2):  # a trainer that resumes from a checkpoint comes with a lower one
            await until_tokens(engine, 20)
            await update(engine, reference.perturbed(version), version, UpdateMode.KEEP)
        answer = await running
        assert [span.version for span in answer.spans] == [0, 3, 2]
        reference.check(prompt, answer.token_ids, answer.logprobs, Sampling(), answer.spans)

    async def test_update_while_paused(self, engine: Engine, reference: Reference) -> None:
        running = asyncio.create_task(collect(engine, job("a", ids(10), 100, Sampling(seed=4))))
        await until_tokens(engine, 10)
        await engine.pause()
        with pytest.raises(WrongOrderError, match="paused"):
            await update(engine, reference.perturbed(1), 1, UpdateMode.WAIT)
        await update(engine, reference.perturbed(2), 2, UpdateMode.KEEP)
        await engine.resume()
        assert [span.version for span in (await running).spans] == [0, 2]

    async def test_same_version_again_is_refused(self, engine: Engine, reference: Reference) -> None:
        with pytest.raises(WrongOrderError, match="version 0"):
            await update(engine, reference.perturbed(1), 0, UpdateMode.KEEP)
        assert (await engine.weight_info()).version == 0

    async def test_close_fails_what_is_in_flight(self, engine: Engine) -> None:
        running = asyncio.create_task(collect(engine, job("a", ids(10), 240)))
        await until_tokens(engine, 3)
        await engine.close()
        with pytest.raises(ConnectionError, match="closed"):
            await running
