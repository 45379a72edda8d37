"""Sampling and stop strings on their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import make_tokenizer
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rollout_service.engines.sampling import process, sample, uniforms
from rollout_service.engines.stops import StopTable


def rows(*values: float, dtype: type = np.float32) -> np.ndarray:
    return np.array(values, dtype)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.999, 1.0])
def test_processing_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 3
    found = process(logits, rows(*[temperature] * 4), rows(*[top_k] * 4, dtype=np.int64), rows(*[top_p] * 4))
    wanted = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    torch.testing.assert_close(found, wanted)


def test_each_row_has_parameters_of_its_own() -> None:
    logits = torch.randn(1, 30).repeat(4, 1)
    parameters = [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.5)]
    temperature, top_k, top_p = (np.array(column) for column in zip(*parameters, strict=True))
    together = process(logits, temperature.astype(np.float32), top_k, top_p.astype(np.float32))
    for number, (t, k, p) in enumerate(parameters):
        alone = process(logits[:1], rows(t), rows(k, dtype=np.int64), rows(p))
        torch.testing.assert_close(together[number], alone[0])


def test_tokens_come_in_proportion_and_never_where_the_probability_is_zero() -> None:
    count = 20_000
    logits = torch.log(torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])).repeat(count, 1)
    uniform = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))
    ones = np.ones(count, np.float32)
    tokens, logprobs = sample(logits, ones, np.zeros(count, np.int64), ones, uniform)
    shares = np.bincount(tokens, minlength=6) / count
    np.testing.assert_allclose(shares, [0, 0.5, 0, 0.2, 0.3, 0], atol=0.015)
    np.testing.assert_allclose(np.exp(logprobs[tokens == 3]), 0.2, atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_ends_of_the_unit_interval_are_tokens_with_probability(uniform: float) -> None:
    logits = torch.log(torch.tensor([[0.0, 0.7, 0.3, 0.0]]))
    tokens, _ = sample(logits, rows(1), rows(0, dtype=np.int64), rows(1), rows(uniform, dtype=np.float64))
    assert tokens[0] == (1 if uniform == 0 else 2)


def test_greedy_row_amid_others() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0], [0.0, 1.0, 5.0]])
    tokens, logprobs = sample(
        logits, rows(0, 1), rows(0, 0, dtype=np.int64), rows(1, 1), rows(0.0, 0.0, dtype=np.float64)
    )
    assert tokens.tolist() == [2, 0]
    assert logprobs[0] == 0
    assert logprobs[1] < -5


def test_uniforms_look_random_and_depend_on_seed_and_position_alone() -> None:
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    values = uniforms(seeds.ravel(), positions.ravel()).reshape(300, 300)
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == 90_000
    assert abs(values.mean() - 0.5) < 0.005
    assert np.abs(np.corrcoef(values[:, :50].T) - np.eye(50)).max() < 0.3
    again = uniforms(np.array([7, 3], np.uint64), np.array([5, 9]))
    assert again.tolist() == [values[5, 7], values[9, 3]]


@pytest.mark.parametrize("stop", ["</python>", "\n\n", "é!", "東京", "🙂", "<|im_end|>", "x"])
@pytest.mark.parametrize("before", ["", "some text ", "東é "])
def test_stop_string_is_found_at_the_token_that_completes_it(stop: str, before: str) -> None:
    tokenizer = make_tokenizer()
    matcher = StopTable(tokenizer, len(tokenizer) + 4).matcher((stop, "never"))
    ids = np.array(tokenizer.encode(f"{before}{stop} and more", add_special_tokens=False), np.int32)
    texts = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
    wanted = next(n for n, text in enumerate(texts) if stop in text)
    found = next(n for n in range(len(ids)) if matcher.completes[ids[n]] and matcher.matches(ids[: n + 1]))
    assert found == wanted
