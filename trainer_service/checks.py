"""What `config.check` and `config.warnings` find. Loads rewards and data, but neither torch nor verl."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer_service import names
from trainer_service.config import SHARED_MEMORY, AlgorithmConfig, RunConfig, WeightsConfig
from trainer_service.data import files, generators
from trainer_service.data.task import Task
from trainer_service.rewards.registry import Judges
from trainer_service.tasks_config import SourceConfig
from turnwire.config import nearest
from turnwire.errors import ConfigError, InvalidRequestError, Problem

_ROWS_LOOKED_AT = 100
_TASKS_MADE = 10
_FEW_IN_FLIGHT = 16

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

CheckContext = Callable[[str, dict[str, Any]], None]
"""Raises InvalidRequestError for a context that the tool of that name would refuse."""


def problems(
    config: RunConfig, served_tools: Collection[str] | None, check_context: CheckContext | None = None
) -> list[Problem]:
    """Everything that would stop the run, or make it other than what the config says."""
    found = [*_model(config), *_algorithm(config.algorithm), *_rollout(config), *_weights(config.weights)]
    found += _tools(config, served_tools)
    judges = None
    try:
        judges = Judges(config.reward)
    except ConfigError as error:
        found += error.problems
    else:
        found += _reward_tools(judges, served_tools)
    for which, sources in (("train", config.data.train), ("eval", config.data.eval)):
        for number, source in enumerate(sources):
            key = f"data.{which}.{number}"
            of_source, tasks = _source(source, key, served_tools)
            found += of_source
            if check_context is not None:
                found += _contexts(
                    tasks, key, source, run_tools=config.tools, served=served_tools or (), check_context=check_context
                )
            if judges is not None:
                found += _ground_truths(tasks, key, source, judges)
    if judges is not None:
        judges.close()
    return [*found, *_overlap(config)]


def warnings(config: RunConfig) -> list[Problem]:
    """What runs, but likely not as hoped."""
    found = []
    rollout, algorithm = config.rollout, config.algorithm
    in_flight = min(rollout.max_in_flight, config.training.prompts_per_step * rollout.group_size)
    if in_flight < _FEW_IN_FLIGHT:
        found.append(
            Problem(
                "rollout.max_in_flight", f"{in_flight} trajectories at once; below 16 the engine and the tools wait"
            )
        )
    if rollout.sampling.top_p < 1 or rollout.sampling.top_k > 0:
        found.append(
            Problem(
                "rollout.sampling",
                "the engine's logprobs are those after top_p and top_k, the trainer's are not: the ratios are off by "
                "what was cut; train with top_p 1 and top_k 0",
            )
        )
    if rollout.max_staleness > 0 and algorithm.old_logprobs == "recompute" and algorithm.rollout_correction is None:
        found.append(
            Problem(
                "algorithm.old_logprobs",
                "with max_staleness above 0 recomputed logprobs hide that older weights sampled; use `rollout`, or add "
                "rollout_correction",
            )
        )
    if algorithm.advantage_estimator == "gdpo" and not algorithm.reward_parts:
        found.append(
            Problem(
                "algorithm.reward_parts",
                "gdpo normalises the parts that are named here one by one; without any it takes the reward as one",
            )
        )
    kl = algorithm.kl
    if kl.coefficient > 0 and kl.placement == "loss" and kl.kind in ("k1", "kl", "abs"):
        found.append(Problem("algorithm.kl.kind", f"the gradient of {kl.kind} in the loss is not the KL's; use k3+"))
    if config.evaluation.every and not config.data.eval:
        found.append(Problem("evaluation.every", "there is nothing to evaluate on: data.eval is empty"))
    if config.weights.canary_every == 0:
        found.append(
            Problem("weights.canary_every", "nothing would notice an engine whose weights are not the trainer's")
        )
    return found


def _model(config: RunConfig) -> Iterator[Problem]:
    name, path = config.model.path, Path(config.model.path)
    if (_HUB_NAME.fullmatch(name) and not path.exists()) or (path / "config.json").is_file():
        return
    literal = "; ~ and $ are taken as they are: write the path out" if name.startswith("~") or "$" in name else ""
    make = f"; make it with: {config.model.made_by}" if config.model.made_by else ""
    yield Problem("model.path", f"there is no model in {path.absolute()}: config.json is missing{literal}{make}")


def _algorithm(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    tables = (
        ("advantage_estimator", algorithm.advantage_estimator, names.ADVANTAGE_ESTIMATORS),
        ("policy_loss", algorithm.policy_loss, names.POLICY_LOSSES),
        ("loss_aggregation", algorithm.loss_aggregation, dict.fromkeys(names.LOSS_AGGREGATIONS, "")),
        ("kl.kind", algorithm.kl.kind, names.KL_KINDS),
    )
    for key, name, table in tables:
        if name not in table:
            allowed = [item for item, reason in table.items() if not reason]
            yield Problem(f"algorithm.{key}", f"unknown: {name!r}; {nearest(name, allowed)}")
        elif table[name]:
            yield Problem(f"algorithm.{key}", f"{name!r} cannot run here: {table[name]}")
    yield from _loss_options(algorithm)
    if algorithm.reward_parts and algorithm.advantage_estimator != "gdpo":
        yield Problem("algorithm.reward_parts", "only the estimator gdpo reads them")
    if algorithm.reward_part_weights and len(algorithm.reward_part_weights) != len(algorithm.reward_parts):
        yield Problem("algorithm.reward_part_weights", "there must be one for each of reward_parts")
    yield from _correction(algorithm)


def _weights(weights: WeightsConfig) -> Iterator[Problem]:
    if weights.folder is not None and weights.transport != "file":
        yield Problem("weights.folder", f"is not read by the transport {weights.transport}; remove it")
    if weights.transport == "shm" and not SHARED_MEMORY.is_dir():
        yield Problem("weights.transport", f"there is no shared memory ({SHARED_MEMORY}) here; use grpc")


def _loss_options(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    allowed = names.LOSS_OPTIONS.get(algorithm.policy_loss, ())
    for option, value in algorithm.loss_options.items():
        if option not in allowed:
            message = f"the loss {algorithm.policy_loss} does not read it; {nearest(option, allowed)}"
            yield Problem(f"algorithm.loss_options.{option}", message)
        elif option == "loss_type":
            if value not in ("ppo_clip", "reinforce"):
                yield Problem("algorithm.loss_options.loss_type", "is `ppo_clip` or `reinforce`")
        elif isinstance(value, str) or value <= 0:
            yield Problem(f"algorithm.loss_options.{option}", f"must be a number above 0, not {value!r}")
    if algorithm.policy_loss == "dro" and "dro_beta" not in algorithm.loss_options:
        yield Problem("algorithm.loss_options.dro_beta", "the loss dro needs it: the weight of its penalty, as 0.1")


def _correction(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    chosen, bypass = algorithm.rollout_correction, algorithm.policy_loss == "bypass_mode"
    if bypass and algorithm.old_logprobs != "rollout":
        yield Problem(
            "algorithm.old_logprobs", "bypass_mode takes the engine's logprobs as the old ones: set `rollout`"
        )
    if chosen is None:
        return
    if not bypass and algorithm.old_logprobs == "rollout":
        yield Problem(
            "algorithm.rollout_correction",
            "with old_logprobs `rollout` the ratio already corrects: set old_logprobs to `recompute`, or remove this",
        )
    threshold = chosen.importance_threshold
    if isinstance(threshold, str) or threshold <= 0:
        yield from _thresholds("importance_threshold", str(threshold), 1, pairs=True)
    if (chosen.rejection is None) != (chosen.rejection_threshold is None):
        yield Problem("algorithm.rollout_correction", "rejection and rejection_threshold go together")
    elif chosen.rejection is not None:
        criteria = [item.strip() for item in chosen.rejection.split(",") if item.strip()]
        for item in criteria:
            if item not in names.REJECTION_CRITERIA:
                message = f"unknown: {item!r}; {nearest(item, names.REJECTION_CRITERIA)}"
                yield Problem("algorithm.rollout_correction.rejection", message)
        pairs = all(item.endswith("k1") for item in criteria)
        yield from _thresholds("rejection_threshold", str(chosen.rejection_threshold), len(criteria), pairs=pairs)


def _thresholds(key: str, text: str, count: int, *, pairs: bool) -> Iterator[Problem]:
    """One number, or `count` separated by commas; `lower_upper` where pairs are allowed."""
    parts = [part.strip() for part in text.split(",")]
    try:
        numbers = [[float(number) for number in part.split("_")] for part in parts]
    except ValueError:
        numbers = []
    longest = 2 if pairs else max(1, *(part.count("_") + 1 for part in parts)) if count > 1 else 1
    good = all(len(pair) <= longest and min(pair) > 0 and pair == sorted(pair) for pair in numbers)
    if not numbers or len(numbers) not in (1, count) or not good:
        shape = "a number above 0" + (", or lower_upper" if pairs else "")
        yield Problem(f"algorithm.rollout_correction.{key}", f"{text!r} must be {shape}")


def _rollout(config: RunConfig) -> Iterator[Problem]:
    group, estimator = config.rollout.group_size, config.algorithm.advantage_estimator
    if group < 2 and estimator in names.COMPARES_GROUP:
        yield Problem("rollout.group_size", f"{estimator} compares the trajectories of a prompt: at least 2")
    if config.rollout.sampling.temperature == 0:
        yield Problem("rollout.sampling.temperature", "training needs trajectories that differ: above 0")
    limits = config.rollout.limits
    if (limits.max_action_tokens or 0) > (limits.max_trajectory_tokens or sys.maxsize):
        yield Problem("rollout.limits.max_action_tokens", "is above max_trajectory_tokens")


def _tools(config: RunConfig, served: Collection[str] | None) -> Iterator[Problem]:
    for tool in config.tools:
        if served is not None and tool not in served:
            yield Problem("tools", f"no tool {tool!r} is served; {nearest(tool, list(served))}")


def _reward_tools(judges: Judges, served: Collection[str] | None) -> Iterator[Problem]:
    for tool, reward in judges.needed_tools().items():
        if served is not None and tool not in served:
            message = (
                f"the reward {reward!r} calls the tool {tool!r}, which is not served: take it out of plugins.exclude"
            )
            yield Problem("reward", message)


def _overlap(config: RunConfig) -> Iterator[Problem]:
    """Sources to train and to evaluate on that are the same one, with rows or indices in common."""
    for number, held_out in enumerate(config.data.eval):
        for place, train in enumerate(config.data.train):
            same = (train.kind, train.path, train.generator, train.arguments) == (
                held_out.kind,
                held_out.path,
                held_out.generator,
                held_out.arguments,
            )
            ends = [source.start + (source.size or sys.maxsize) for source in (train, held_out)]
            if same and max(train.start, held_out.start) < min(ends):
                message = f"has tasks that data.train.{place} trains on; keep them apart with `start` and `size`"
                yield Problem(f"data.eval.{number}", message)


def _source(source: SourceConfig, key: str, served: Collection[str] | None) -> tuple[list[Problem], list[Task]]:
    """What is wrong with a source, and its first tasks."""
    found = [
        Problem(f"{key}.tools", f"no tool {tool!r} is served; {nearest(tool, list(served))}")
        for tool in source.tools or []
        if served is not None and tool not in served
    ]
    try:
        if source.kind == "procedural":
            make = generators.create(source.generator, source.arguments, key)
            tasks = [make(source.start + number) for number in range(min(_TASKS_MADE, source.size or 1))]
        else:
            tasks = files.load_tasks(source, key, limit=_ROWS_LOOKED_AT)
    except ConfigError as error:
        return [*found, *error.problems], []
    named = {tool for task in tasks for tool in task.tools}
    for tool in sorted(named - set(served)) if served is not None else ():
        fix = "rename or drop it with `tool_names`, or set `tools_kwargs: ignore`" if source.path else "serve it"
        message = f"its tasks use the tool {tool!r}, which is not served: {fix}; {nearest(tool, list(served or ()))}"
        found.append(Problem(key, message))
    return found, tasks


def _row(task: Task, source: SourceConfig) -> str:
    return f"{source.path} row {task.task_id.rpartition('-')[2]}" if source.path else f"task {task.task_id}"


def _contexts(
    tasks: Sequence[Task],
    key: str,
    source: SourceConfig,
    *,
    run_tools: Sequence[str],
    served: Collection[str],
    check_context: CheckContext,
) -> Iterator[Problem]:
    """The first context of each tool that the tool would refuse."""
    refused: set[str] = set()
    for task in tasks:
        given = task.tools or {tool: {} for tool in (run_tools if source.tools is None else source.tools)}
        for tool, context in given.items():
            if tool in refused or tool not in served:
                continue
            try:
                check_context(tool, context)
            except InvalidRequestError as error:
                refused.add(tool)
                why = (
                    f"correct extra_info.tools_kwargs.{tool}.create_kwargs (read with `tools_kwargs: contexts`), "
                    "or drop the tool with `tool_names`"
                    if task.tools
                    else "it names no tool, so it gets all of `tools`: set `tools` to those that these tasks need, or "
                    f"give contexts with extra_info.tools_kwargs.{tool}.create_kwargs"
                )
                yield Problem(key, f"{_row(task, source)}, {error.message}; {why}")


def _ground_truths(tasks: Sequence[Task], key: str, source: SourceConfig, judges: Judges) -> Iterator[Problem]:
    """The first task that its reward could not judge."""
    for task in tasks:
        reward = judges.of(source.data_source or task.data_source)
        try:
            reward.check_task(task)
        except ValueError as error:
            fix = "choose another with `reward.by_source`, or replace this source"
            yield Problem(key, f"{_row(task, source)}, reward {reward.name!r}: {error}; {fix}")
            return
