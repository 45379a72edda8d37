"""`turnwire eval`: the accuracy of a policy on held-out tasks, without training."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from turnwire.cli import launch, output
from turnwire.cli.connecting import connection_options
from turnwire.cli.summary import evaluation_json, print_evaluation, print_failure
from turnwire.cli.train import Job, carry_out, exit_code
from turnwire.errors import ConfigError, NotFoundError, Problem
from turnwire.security.config import ConnectionSecurity


@click.command("eval")
@click.argument("config", metavar="CONFIG|RUN")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--target", metavar="HOST:PORT", help="Use this running trainer service, instead of starting services here."
)
@connection_options
@click.option("--run-id", help="Name of the evaluation's folder.  [default: the config's name and the time]")
@click.option(
    "--runs-folder", default="runs", show_default=True, help="Where runs are, and where the evaluation is kept."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; progress goes to stderr.")
def command(
    *,
    config: str,
    overrides: tuple[str, ...],
    target: str | None,
    security: ConnectionSecurity,
    run_id: str | None,
    runs_folder: str,
    as_json: bool,
) -> None:
    """Evaluate the policy of CONFIG, or the last checkpoint of RUN (its folder or id), on the tasks of data.eval.

    It is a run without training steps, so its trajectories can be looked at with `turnwire view --eval`.
    """
    run = _run_folder(config, runs_folder)
    settings = ["training.steps=0", "evaluation.before=true", *overrides]
    if run is not None:
        config, settings = str(run), [f"model.path={_last_checkpoint(run)}", *settings]
    found = launch.examine(config, settings, services=target is None)
    resolved = found.usable()
    if target is None and resolved.services is None:
        raise ConfigError(
            [Problem("services", "missing; name a running trainer with --target HOST:PORT")], found.source
        )
    if not resolved.run.data.eval:
        raise ConfigError([Problem("run.data.eval", "is empty: there is nothing to evaluate on")], found.source)
    run_id = (
        run_id
        if run_id is not None
        else launch.fresh_run_id(f"eval-{resolved.run.name}", lambda name: (Path(runs_folder) / name).exists())
    )
    state = carry_out(Job(resolved, target, run_id, runs_folder, security), output.notes)
    if as_json:
        output.print_json(evaluation_json(state))
    else:
        print_failure(state)
        for evaluation in state.evaluations[-1:]:
            print_evaluation(evaluation)
            output.console.print(
                f"see one  {output.this_command()} view {output.near(state.folder)} --eval", soft_wrap=True
            )
    sys.exit(exit_code(state))


def _run_folder(name: str, runs_folder: str) -> Path | None:
    folders = (Path(name), Path(runs_folder) / name)
    return next((folder for folder in folders if launch.config_of_run(folder) is not None), None)


def _last_checkpoint(run: Path) -> Path:
    """The model of the last whole checkpoint: folders `step-000010` sort by step."""
    found = sorted(run.glob("checkpoints/step-*/model"))
    if not found:
        raise NotFoundError(f"{run} has no checkpoint yet; evaluate its config instead: turnwire eval CONFIG")
    return found[-1]
