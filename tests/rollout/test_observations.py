"""What a text model is shown of an observation that holds more than text."""

from __future__ import annotations

from rollout_service.task import shown_text
from turnwire.v1 import common_pb2


def test_media_that_a_text_model_cannot_see_are_named() -> None:
    image = common_pb2.MediaPart(data=b"12345", media_type="image/png")
    parts = [
        common_pb2.ContentPart(text="drawn\n[outputs/a.png]"),
        common_pb2.ContentPart(image=image),
        common_pb2.ContentPart(text="\nend"),
        common_pb2.ContentPart(video=common_pb2.MediaPart(data=b"", media_type="video/mp4")),
    ]
    assert shown_text(parts) == "drawn\n[outputs/a.png] (image/png, 5 bytes)\nend (video/mp4, 0 bytes)"
