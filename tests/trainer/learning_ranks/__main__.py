"""As one of torchrun's processes. `--config FILE` has `model`, `cases` (sections of a run's config, by name), `output`.

Rank 0 writes a folder for each case: a checkpoint after the first update, and `outcome.pt`. Then it prints a line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from learning_ranks import case_config, learn
from trainer_service.learner import build
from trainer_service.ranks import join
from turnwire.config import read_yaml


def main() -> int:
    """Returns the exit code."""
    values = read_yaml(Path(sys.argv[-1]))
    ranks = join(600)
    if ranks.rank:
        ranks.follow(lambda config, path: build(config, path, ranks))
        return 0
    for name, sections in values["cases"].items():
        folder = Path(values["output"]) / name
        folder.mkdir()
        learn(case_config(Path(values["model"]), sections), folder, ranks)
    ranks.end()
    sys.stdout.write("all is learned\n")
    sys.stdout.flush()
    return 0
