"""Files into a workspace by a trajectory's context, and out of it by the folder `outputs`; figures among them."""

import base64
import importlib.util
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from tool_harness import Service, Trajectory, binding, error_of, text_of, texts
from workspace_harness import BACKENDS, service_on, turns

from tool_service.config import ToolServiceConfig, check
from turnwire.config import convert
from turnwire.v1 import tool_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")


def png(width: int = 1) -> bytes:
    """A whole image, with no help."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(b"\0" + b"\0" * width)
    header = struct.pack(">IIBBBBB", width, 1, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BACKENDS)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    limits = {"max_output_files": 3, "max_output_bytes": 5000, "max_input_files": 5, "max_input_bytes": 10_000}
    async with service_on(request.param, tools={"python": limits, "bash": limits}) as running:
        yield running


def shown(observation: tool_pb2.Observation) -> list[str | bytes]:
    """Texts as text, images as bytes."""
    assert all(part.image.media_type.startswith("image/") for part in observation.content if part.HasField("image"))
    return [part.image.data or part.text for part in observation.content]


# -- in


@pytest.mark.parametrize("tool", ["python", "bash"])
async def test_a_trajectory_brings_files(service: Service, tool: str) -> None:
    files = {"a.txt": "héllo", "data/raw.bin": {"base64": base64.b64encode(b"\0\xff").decode()}, "empty": ""}
    look = {
        "python": "sorted(open(f, 'rb').read() for f in ('a.txt', 'data/raw.bin', 'empty'))",
        "bash": "cat a.txt; od -An -tx1 data/raw.bin; wc -c <empty",
    }[tool]
    expected = {"python": r"[b'', b'\x00\xff', b'h\xc3\xa9llo']", "bash": "héllo 00 ff\n0"}[tool]
    (observation,) = await turns(service, tool, look, context={"files": files})
    assert text_of(observation) == expected
    (observation,) = await turns(service, "bash", "ls")
    assert text_of(observation) == "", "another trajectory has none of them"


@pytest.mark.parametrize(
    "obstacle",
    ["import os; os.mkfifo('in')", "import os; os.symlink('/etc', 'in')", "open('in', 'w').write('x')"],
)
async def test_no_program_stands_in_the_way_of_another_tools_files(service: Service, obstacle: str) -> None:
    trajectory = Trajectory(service, f"obstacle-{hash(obstacle)}")
    await trajectory.open(binding("python"), binding("bash", {"files": {"in/a.txt": "there"}}))
    answer = await trajectory.act(0, f"<python>{obstacle}</python>")
    assert error_of(answer.observations[0]) == "TOOL_ERROR"
    assert texts(await trajectory.act(1, "<bash>cat in/a.txt</bash>")) == ["there"]
    await trajectory.close()


async def test_files_are_there_again_when_the_sandbox_was_lost(service: Service) -> None:
    said = await turns(service, "bash", "rm a", "kill -9 -1", "cat a", context={"files": {"a": "again"}})
    assert error_of(said[2]) == "TOOL_ERROR" or text_of(said[2]).endswith("again")


@pytest.mark.parametrize(
    "name",
    [
        *("../a", "/etc/a", "a/../../b", "a//b", "./a", ".", "..", "", "a/", "a\0b", "a/../b", "x" * 5000),
        "/".join(["d"] * 600),
        "x" * 300,
    ],
)
async def test_a_name_that_is_none_is_the_clients_mistake(service: Service, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await turns(service, "bash", "ls", context={"files": {name: "x"}})
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "context of tool 'bash'" in (error.value.details() or "")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({str(n): "" for n in range(6)}, "at most 5"),
        ({"a": "x" * 9000, "b": "x" * 2000}, "at most 10000"),
        ({"a": {"base64": "not base64!"}}, "base64"),
        ({"a": {"base64": "AA==", "more": 1}}, "more"),
        ({"a": 5}, "str"),
        ({"a": "", "a/b": ""}, "'a' is a file as well"),
    ],
)
async def test_files_that_cannot_be_are_the_clients_mistake(service: Service, files: dict[str, Any], says: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=says) as error:
        await turns(service, "python", "1", context={"files": files})
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# -- out


@pytest.mark.parametrize("tool", ["python", "bash"])
async def test_what_a_turn_leaves_in_outputs_comes_back_with_it(service: Service, tool: str) -> None:
    picture = base64.b64encode(png()).decode()
    write = {
        "python": "import base64, os\nos.makedirs('outputs/sub')\nprint('made')\n"
        "open('outputs/b.txt', 'w').write('text\\n')\n"
        f"open('outputs/a.dat', 'wb').write(base64.b64decode('{picture}'))\n"
        "open('outputs/sub/c', 'wb').write(b'\\0' * 9)",
        "bash": "mkdir -p outputs/sub; echo made; echo text >outputs/b.txt; "
        f"base64 -d <<<{picture} >outputs/a.dat; head -c 9 /dev/zero >outputs/sub/c",
    }[tool]
    again = {"python": "open('outputs/b.txt', 'a').write('more')", "bash": "printf more >>outputs/b.txt"}[tool]
    said = await turns(service, tool, write, "", again)
    result = "9\n" if tool == "python" else ""
    assert shown(said[0]) == [
        f"made\n{result}".rstrip("\n"),
        "\n[outputs/a.dat]",
        png(),
        "\n[outputs/b.txt]\ntext",
        "\n[outputs/sub/c: 9 bytes]",
    ]
    assert [dict(file) for file in said[0].data["files"]] == [
        {"path": "outputs/a.dat", "bytes": len(png())},
        {"path": "outputs/b.txt", "bytes": 5, "text": "text\n"},
        {"path": "outputs/sub/c", "bytes": 9},
    ]
    assert shown(said[1]) == [""]
    assert text_of(said[2]).endswith("[outputs/b.txt]\ntext\nmore")


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("truncate -s 1T outputs/a", None),
        ("truncate -s 60M outputs/a", "[outputs/a: 62914560 bytes, not shown]"),
        ("head -c 5001 /dev/zero >outputs/a", "[outputs/a: 5001 bytes, not shown]"),
        ("ln -s /etc/passwd outputs/a; ln -s ../secret outputs/b; echo s >secret", ""),
        ("mkfifo outputs/a; mkdir outputs/b; mknod outputs/c c 1 3", None),
        ("touch outputs/{1,2,3,4,5}", "[outputs/1]\n\n[outputs/2]\n\n[outputs/3]\n\n[2 more files in outputs]"),
        ("touch outputs/$'\\xff' outputs/$'a\\nb' outputs/ok", "[outputs/ok]\n"),
        ("printf 'GIF89a...' >outputs/a.png; printf '\\x89PNG no' >outputs/b.png", None),
        ("mkdir -p outputs/1/2/3/4/5/6/7/8/9/10; touch outputs/1/2/3/4/5/6/7/8/9/10/deep; touch outputs/1/a",
         "[outputs/1/a]\n"),
        ("cd outputs; ln -s . loop; touch a; chmod 000 a", None),
        ("for n in {1..3000}; do : >outputs/$n; done", None),
        ("touch outputs/a; exit 3", None),
        ("rm -r outputs; ln -s / outputs", ""),
    ],
)  # fmt: skip
async def test_only_plain_files_within_bounds_come_back(service: Service, script: str, text: str | None) -> None:
    said = await turns(service, "bash", "mkdir outputs", script, "echo alive")
    assert "root:" not in text_of(said[1])
    assert len(said[1].content) <= 8
    if text is not None:
        assert text_of(said[1]) == text
    assert text_of(said[2]).endswith("alive")


async def test_a_file_is_an_image_by_its_first_bytes_and_not_by_its_name(service: Service) -> None:
    said = await turns(
        service, "bash", "mkdir outputs; printf 'GIF89a...' >outputs/a.txt; printf '<svg/>' >outputs/b.png"
    )
    assert shown(said[0]) == ["[outputs/a.txt]", b"GIF89a...", "\n[outputs/b.png]\n<svg/>"]


@pytest.mark.needs("isolated-sandbox")
async def test_names_that_do_not_fit_into_an_answer_are_left_out() -> None:
    async with service_on("process", sandbox={"limits": {"value_bytes": 1024}}) as small:
        for tool, make in (
            ("bash", "mkdir outputs; touch outputs/{1..60}"),
            ("python", "import os; os.mkdir('outputs'); [open(f'outputs/{n}', 'w') for n in range(60)] and None"),
        ):
            said = await turns(small, tool, make, "echo 2" if tool == "bash" else "2")
            assert text_of(said[0]).startswith("[outputs/")
            assert [error_of(observation) for observation in said] == ["", ""]


async def test_a_program_that_lies_about_its_files_gains_nothing(service: Service) -> None:
    said = await turns(
        service,
        "python",
        "import os, sys\nworker = [m for n, m in sys.modules.items() if n.endswith('inside.outputs')][0]\n"
        "lies = [['/etc/passwd', 1], ['../../etc/passwd', 1], ['outputs', 0], [1, 'x'], 'x', ['nothing', 5]]\n"
        "worker.Outputs.changed = lambda self: lies",
        "1 + 1",
    )
    assert "root:" not in text_of(said[1])
    assert text_of(said[1]).startswith("2\n[/etc/passwd: 1 bytes, not shown]")


# -- figures


SITE = str(Path(importlib.util.find_spec("numpy").origin).parents[1])  # type: ignore[union-attr, arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drawing() -> AsyncIterator[Service]:
    """The process backend, with this environment's packages shown to the code."""
    async with service_on(
        "process",
        sandbox={"process": {"read_only_paths": [SITE]}},
        tools={"python": {"import_paths": [SITE], "timeout_seconds": 60}},
    ) as running:
        yield running


@pytest.mark.needs("isolated-sandbox")
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
async def test_open_figures_come_back_as_images_and_are_closed(drawing: Service) -> None:
    said = await turns(
        drawing,
        "python",
        "import numpy\nimport matplotlib.pyplot as plt\n"
        "for n in range(2):\n    plt.figure(figsize=(1, 1))\n    plt.plot(numpy.arange(3))\nplt.show()\n'drawn'",
        "plt.get_fignums()",
        "plt.plot([1]); plt.title(r'$\\frac{$')",
        "plt.plot([1]); 1 / 0",
        "import os; sorted(os.listdir('.'))",
        seconds=60,
    )
    images = [part.image.data for part in said[0].content if part.HasField("image")]
    assert len(images) == 2
    assert all(image.startswith(b"\x89PNG") for image in images)
    assert text_of(said[0]) == "'drawn'\n[outputs/figure_1.png]\n[outputs/figure_2.png]"
    assert shown(said[1]) == ["[]"]
    assert error_of(said[2]) == "TOOL_ERROR"
    assert "ZeroDivisionError" in text_of(said[3])
    assert [part.image.media_type for part in said[3].content if part.HasField("image")] == ["image/png"]
    assert text_of(said[4]) == "['outputs']"


async def test_packages_that_no_sandbox_shows_are_found_before_the_start() -> None:
    tools = {"python": {"import_paths": ["/opt/packages"]}}
    (problem,) = check(convert({"tools": tools}, ToolServiceConfig))
    assert str(problem) == (
        "tools.python.import_paths: /opt/packages is not in sandboxes; add it to sandbox.process.read_only_paths"
    )
    shown_too = {"process": {"read_only_paths": ["/opt"]}}
    assert check(convert({"tools": tools, "sandbox": shown_too}, ToolServiceConfig)) == []
