"""Prints what an image holds as a CycloneDX bill of materials: the Python packages beside this interpreter and, where
there are any, Debian's, each with its version and licence. Run while an image is built; standard library alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from typing import Any

_MOST_LICENCE = 100
"""Characters of a licence's name. What is longer is the licence's text."""


def python_packages() -> list[dict[str, Any]]:
    """Of the environment."""
    found = []
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        found.append(component(f"pkg:pypi/{name}", name, distribution.version, licence(distribution.metadata)))
    return found


def licence(about: Any) -> str:
    """What a package says of its licence: the expression, the field, or its classifiers."""
    named = [text for key in ("License-Expression", "License") if (text := about.get(key)) and is_name(text)]
    classified = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier", ()) if text.startswith("License")]
    return next(iter(named), " AND ".join(classified))


def is_name(text: str) -> bool:
    """Whether it names a licence, and does not quote it."""
    return "\n" not in text.strip() and len(text) <= _MOST_LICENCE and text.upper() != "UNKNOWN"


def debian_packages() -> list[dict[str, Any]]:
    """Of the system; their licences are in /usr/share/doc/NAME/copyright."""
    listing = "${Package}\\t${Version}\\t${Architecture}\\n"
    try:
        lines = subprocess.run(
            ["dpkg-query", "--show", "-f", listing], capture_output=True, text=True, check=True
        ).stdout
    except FileNotFoundError:
        return []
    rows = [line.split("\t") for line in lines.splitlines()]
    return [component(f"pkg:deb/debian/{name}", name, version, "", f"?arch={arch}") for name, version, arch in rows]


def component(url: str, name: str, version: str, licence: str, qualifiers: str = "") -> dict[str, Any]:
    """As CycloneDX has it."""
    made = {"type": "library", "name": name, "version": version, "purl": f"{url}@{version}{qualifiers}"}
    return {**made, "licenses": [{"license": {"name": licence}}]} if licence else made


def main() -> None:
    """The command."""
    components = sorted(python_packages() + debian_packages(), key=lambda item: item["purl"])
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components}
    json.dump(bill, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
