"""What is in the images of the services, and what is not."""

from __future__ import annotations

import json
import subprocess

import pytest
from compose_stack import IMAGES, ROOT

import turnwire

pytestmark = pytest.mark.needs("stack")

each_image = pytest.mark.parametrize("image", IMAGES)


def inside(image: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a container of it, as its user."""
    program, *arguments = command
    return subprocess.run(
        ["docker", "run", "--rm", "--network", "none", "--entrypoint", program, image, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@each_image
def test_it_runs_as_a_user_of_its_own_that_can_change_nothing_but_data(image: str) -> None:
    writable = "[path for path in ('/app', '/opt', '/usr', '/etc', '/') if os.access(path, os.W_OK)]"
    code = f"import os; print(os.getuid(), os.getgid(), {writable})"
    assert inside(image, "python", "-c", code).stdout == "10001 10001 []\n"


@each_image
def test_nothing_that_builds_or_installs_is_left(image: str) -> None:
    programs = "for name in pip pip3 gcc cc g++ make git curl wget; do command -v $name; done"
    assert inside(image, "sh", "-c", programs).stdout == ""
    assert "No module named pip" in inside(image, "python", "-m", "pip", "--version").stderr


@each_image
def test_it_says_what_it_is_and_how_it_is(image: str) -> None:
    (found,) = json.loads(subprocess.run(["docker", "inspect", image], capture_output=True, check=True).stdout)
    labels = found["Config"]["Labels"]
    name = image.partition("/")[2].partition(":")[0]
    assert labels["org.opencontainers.image.title"] == f"turnwire {name} service"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.version"] == "dev"
    assert found["Config"]["Healthcheck"]["Test"][:4] == ["CMD", "python", "-m", "turnwire.health"]
    assert (
        inside(image, "python", "-c", "import turnwire; print(turnwire.__version__)").stdout.strip()
        == turnwire.__version__
    )


@each_image
def test_its_bill_of_materials_is_its_lock_with_the_licences_and_debians_packages(image: str) -> None:
    bill = json.loads(inside(image, "cat", "/usr/share/doc/turnwire/turnwire.cdx.json").stdout)
    packages = {part["purl"].partition("@")[0].partition(":")[2]: part for part in bill["components"]}
    name = image.partition("/")[2].partition(":")[0]
    for line in (ROOT / "locks" / f"{name}.txt").read_text().splitlines()[1:]:
        package, _, version = line.partition("==")
        assert packages[f"pypi/{package}"]["version"].partition("+")[0] == version
    assert {"deb/debian/libc6", "deb/debian/tzdata"} & packages.keys()
    licensed = [part for key, part in packages.items() if key.startswith("pypi/") and "licenses" in part]
    assert len(licensed) > 0.9 * sum(key.startswith("pypi/") for key in packages)


@each_image
def test_a_config_that_cannot_be_used_ends_it_with_the_reason(image: str) -> None:
    done = subprocess.run(
        ["docker", "run", "--rm", "--network", "none", image], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "cannot be read: No such file or directory" in done.stderr
