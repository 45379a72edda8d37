"""Images of requests: what is taken, and how they are decoded.

They come from whoever calls, so nothing is believed: few formats, and a size that is known before a pixel is decoded,
so that a small file cannot become gigabytes. How many bytes there may be is the server's `max_message_bytes`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from turnwire.errors import InvalidRequestError
from turnwire.v1 import common_pb2

if TYPE_CHECKING:
    from PIL import Image

MAX_IMAGES = 64
"""Of one prompt."""
MAX_PIXELS = 1 << 25
"""Of all of them together: 96 MiB, decoded."""

_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
"""By media type, the decoder's name."""


def check_images(images: Sequence[common_pb2.MediaPart], modalities: Sequence[str]) -> None:
    """What can be said without decoding. Raises InvalidRequestError for images that the model cannot read, and for what
    is no image."""
    if images and "image" not in modalities:
        raise InvalidRequestError(
            "it holds an image, and this engine's model reads text only: "
            "use engine.kind vllm with a model that reads images"
        )
    if len(images) > MAX_IMAGES:
        raise InvalidRequestError(f"there are {len(images)} images; there may be {MAX_IMAGES}")
    for image in images:
        if image.media_type not in _FORMATS:
            raise InvalidRequestError(f"an image is {image.media_type[:50]!r}; use one of {', '.join(_FORMATS)}")


def decode_images(images: Sequence[common_pb2.MediaPart]) -> list[Image.Image]:
    """The images, in RGB. Takes long for large ones: not for an event loop. Raises InvalidRequestError for bytes that
    are no image of their media type, and for more than MAX_PIXELS."""
    decoded, room = [], MAX_PIXELS
    for image in images:
        decoded.append(_decode(image, room))
        room -= decoded[-1].width * decoded[-1].height
    return decoded


def _decode(image: common_pb2.MediaPart, room: int) -> Image.Image:
    from PIL import Image  # noqa: PLC0415 - what vLLM brings along; text engines need none

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is looked at here
            opened = Image.open(io.BytesIO(image.data), formats=[_FORMATS[image.media_type]])
            if (pixels := opened.width * opened.height) <= room:
                return opened.convert("RGB")
    except Exception as error:  # whatever a decoder raises on bytes of anybody's choice, the bytes are the reason
        raise InvalidRequestError(f"an image of {image.media_type} cannot be decoded: {error}") from error
    raise InvalidRequestError(f"an image has {pixels} pixels; all images of a prompt may have {MAX_PIXELS}")
