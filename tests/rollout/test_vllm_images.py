"""Images on the engine `vllm`, with a model that reads them: what transformers' own model and processor give."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine_reference import TOLERANCE
from PIL import Image
from rollout_harness import Running, check_trajectory, reason, rollouts
from service_conformance import params
from tiny_models import make_seeing_model
from transformers import AutoModelForImageTextToText, AutoProcessor
from vllm_engines import VLLM

from rollout_service.engines.base import GenerateJob, Sampling
from turnwire.client.rollout import Generation, rollout_limits, rollout_task
from turnwire.errors import InvalidRequestError
from turnwire.tensors import from_tensor
from turnwire.torch_weights import policy_tensors, weight_tensors
from turnwire.v1 import common_pb2, rollout_pb2

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]


def encoded(picture: Image.Image, kind: str = "PNG") -> common_pb2.MediaPart:
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return common_pb2.MediaPart(data=buffer.getvalue(), media_type=f"image/{kind.lower()}")


RED = Image.new("RGB", (40, 30), (255, 0, 0))
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 60, 3)).astype(np.uint8))


class Seeing:
    """The model without cache or batch, and its processor."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.processor = AutoProcessor.from_pretrained(folder)
        tokenizer = self.processor.tokenizer
        self.image_id = tokenizer.convert_tokens_to_ids("<image>")
        around, mark = (
            tokenizer.convert_tokens_to_ids(f"<{name}>") for name in ("fake_token_around_image", "global-img")
        )
        self._becomes = [around, mark, *[self.image_id] * 4, around]
        self.prompt = [*tokenizer.encode("what is ", add_special_tokens=False), self.image_id, 5, 6, 7]

    @torch.no_grad()
    def logprobs(self, tokens: list[int], pictures: list[Image.Image], sampled: slice) -> np.ndarray:
        """Of the sampled tokens, in a pass over all, images and all."""
        images = self.processor.image_processor([pictures], return_tensors="pt")
        expanded = [n for token in tokens for n in (self._becomes if token == self.image_id else [token])]
        shift = len(expanded) - len(tokens)
        logits = self.model(
            input_ids=torch.tensor([expanded]),
            pixel_values=images["pixel_values"],
            pixel_attention_mask=images["pixel_attention_mask"],
            use_cache=False,
        ).logits[0]
        rows = torch.log_softmax(logits.float(), -1)
        return np.array([rows[place + shift - 1, tokens[place]] for place in range(sampled.start, sampled.stop)])

    def check(self, prompt: list[int], answer: Generation, *pictures: Image.Image) -> None:
        tokens = [*prompt, *answer.token_ids.tolist()]
        wanted = self.logprobs(tokens, list(pictures), slice(len(prompt), len(tokens)))
        np.testing.assert_allclose(answer.logprobs, wanted, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Seeing:
    return Seeing(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(folder: Path) -> AsyncIterator[Running]:
    engine = {"kind": "vllm", "threads": None, "max_sequences": 16, "vllm": VLLM}
    async with rollouts(folder, engine=engine) as service:
        yield service


async def generate(running: Running, prompt: list[int], *images: common_pb2.MediaPart, seed: int = 1) -> Generation:
    return await running.client.generate(prompt, 8, sampling=params(Sampling(seed=seed)), images=images)


async def test_the_service_says_that_its_model_reads_images(running: Running) -> None:
    info = await running.client.get_server_info()
    assert list(info.modalities) == [common_pb2.MODALITY_TEXT, common_pb2.MODALITY_IMAGE]


async def test_tokens_follow_from_the_image(running: Running, seeing: Seeing) -> None:
    answers = []
    for picture in (RED, NOISE, RED):
        answers.append(await generate(running, seeing.prompt, encoded(picture)))
        seeing.check(seeing.prompt, answers[-1], picture)
    red, noise, again = (answer.token_ids.tolist() for answer in answers)
    assert red == again
    assert red != noise


async def test_images_go_where_their_placeholders_are(running: Running, seeing: Seeing) -> None:
    prompt = [*seeing.prompt, *seeing.prompt]
    for pictures in ((RED, NOISE), (NOISE, RED)):
        answer = await generate(running, prompt, *(encoded(picture) for picture in pictures), seed=3)
        seeing.check(prompt, answer, *pictures)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
async def test_other_formats_are_taken(running: Running, seeing: Seeing, kind: str) -> None:
    image = encoded(NOISE, kind)
    seeing.check(
        seeing.prompt, await generate(running, seeing.prompt, image), Image.open(io.BytesIO(image.data)).convert("RGB")
    )


async def test_a_trajectory_holds_the_placeholder_and_follows_from_the_image(running: Running, seeing: Seeing) -> None:
    message = {"role": "user", "content": ["look: ", encoded(NOISE), " well? <image>", "<ima", "ge>"]}
    limits = rollout_limits(max_action_tokens=12)
    _, trajectory = await running.one(rollout_task("t", [message], ["echo"], seed=4, limits=limits))
    (segment,) = trajectory.segments
    tokens = from_tensor(segment.token_ids, np.int32).tolist()
    assert tokens.count(seeing.image_id) == 1  # those of the text are none
    action = slice(segment.prompt_length, len(tokens))
    wanted = seeing.logprobs(tokens, [NOISE], action)
    np.testing.assert_allclose(from_tensor(segment.logprobs, np.float32)[action], wanted, atol=TOLERANCE, rtol=0)


async def test_later_turns_see_the_image_too(running: Running, seeing: Seeing) -> None:
    """Observations between the turns, and vLLM's prefix cache from one to the next."""
    chat, tokens = running.chat, np.array(seeing.prompt, np.int32)
    for turn in range(3):
        job = GenerateJob(f"x#{turn}", tokens, 9, Sampling(seed=turn + 7), images=(encoded(NOISE),))
        (delta,) = [delta async for delta in running.engine.generate(job)]
        assert delta.image_tokens == 6
        whole = np.concatenate([tokens, delta.token_ids])
        wanted = seeing.logprobs(whole.tolist(), [NOISE], slice(len(tokens), len(whole)))
        np.testing.assert_allclose(delta.logprobs, wanted, atol=TOLERANCE, rtol=0)
        tokens = np.concatenate([whole, chat.bridge.around(delta.token_ids, chat.text("some text"))])


def bomb() -> common_pb2.MediaPart:
    """Four hundred million pixels in 50 kB."""
    return encoded(Image.new("1", (20_000, 20_000)))


BAD: list[tuple[list[common_pb2.MediaPart], str]] = [
    ([common_pb2.MediaPart(data=b"no image", media_type="image/png")], "cannot be decoded"),
    ([common_pb2.MediaPart(media_type="image/png")], "cannot be decoded"),
    ([common_pb2.MediaPart(data=encoded(NOISE).data[:500], media_type="image/png")], "cannot be decoded"),
    ([common_pb2.MediaPart(data=encoded(NOISE).data, media_type="image/jpeg")], "cannot be decoded"),
    ([common_pb2.MediaPart(data=b"<svg/>", media_type="image/svg+xml")], "use one of image/png"),
    ([bomb()], "400000000 pixels"),
    ([encoded(RED)] * 65, "65 images"),
]


@pytest.mark.parametrize(("images", "says"), BAD, ids=[f"{number}-{says}" for number, (_, says) in enumerate(BAD)])
async def test_what_is_no_image_is_refused(
    running: Running, seeing: Seeing, images: list[common_pb2.MediaPart], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        await generate(running, seeing.prompt, *images)
    bad = rollout_task("bad", [{"role": "user", "content": images}])
    good = rollout_task("good", [{"role": "user", "content": [encoded(RED)]}])
    ended: dict[str, Any] = {}
    async for event in running.client.run([bad, good]):
        if isinstance(event, rollout_pb2.Trajectory):
            ended[event.trajectory_id] = event
    assert (reason(ended["bad"]), says if says in ended["bad"].error else ended["bad"].error) == ("INVALID_TASK", says)
    check_trajectory(ended["good"])
    assert reason(ended["good"]) not in ("INVALID_TASK", "INFRA_ERROR")


async def test_images_and_placeholders_must_fit(running: Running, seeing: Seeing) -> None:
    """A refused request leaves nothing that the next one with its image stumbles over."""
    for number, (before, count, says) in enumerate(
        [
            ([], 2, "does not take these images with this prompt"),
            ([5] * (252 - len(seeing.prompt)), 1, "with its images the prompt has"),
        ]
    ):
        picture = Image.new("RGB", (20, 20), (number, 9, 9))
        with pytest.raises(InvalidRequestError, match=says):
            await generate(running, [*before, *seeing.prompt], *[encoded(picture)] * count)
        seeing.check(seeing.prompt, await generate(running, seeing.prompt, encoded(picture)), picture)
    with pytest.raises(InvalidRequestError, match="does not take these images with this prompt"):
        await generate(running, [5, 6, 7], encoded(RED))


async def test_a_group_shares_a_new_image(running: Running, seeing: Seeing) -> None:
    picture = Image.new("RGB", (33, 44), (1, 2, 3))
    answers = await asyncio.gather(
        *(generate(running, seeing.prompt, encoded(picture), seed=seed) for seed in range(12))
    )
    for answer in answers:
        if seeing.image_id not in answer.token_ids.tolist():
            seeing.check(seeing.prompt, answer, picture)


async def test_new_weights_see_anew(running: Running, seeing: Seeing) -> None:
    """Eyes are weights, too: what they saw under the old ones is not used again."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in policy_tensors(seeing.model).values():
            tensor += 0.1 * tensor.std().nan_to_num(0.1) * torch.randn(tensor.shape, generator=generator)
    await running.client.update_weights(weight_tensors(policy_tensors(seeing.model)), 1)
    for picture in (RED, NOISE):
        answer = await generate(running, seeing.prompt, encoded(picture))
        assert [span.version for span in answer.weight_spans] == [1]
        seeing.check(seeing.prompt, answer, picture)
