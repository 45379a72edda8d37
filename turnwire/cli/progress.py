"""A run as it goes on: what is known of it (`RunState`), live on a terminal, or line by line elsewhere."""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turnwire.cli import accuracy
from turnwire.client.trainer import ENDED
from turnwire.enums import short_name
from turnwire.v1 import trainer_pb2

REWARD_PREFIX = "reward/"
REWARD_OF_ALL = "reward/mean"
TOOL_USE_PREFIX = "tool_use/"
TOOL_USE = "tool_use/mean"
TOKENS_PER_SECOND = "tokens_per_second"
STALENESS = "staleness/mean"
STEP_SECONDS = "time/step_seconds"
_TIME_PREFIX, _TIME_SUFFIX = "time/", "_seconds"
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
_STEPS_FOR_SPEED = 12


@dataclass
class RunState:
    """All that the events of a run have said.

    since: when it was started, by the trainer's clock. What is older comes from before a resume.
    rewards: by data source, mean reward by step.
    """

    run_id: str
    total_steps: int
    folder: str = ""
    since: float = 0.0
    state: trainer_pb2.RunState.ValueType = trainer_pb2.RUN_STATE_STARTING
    detail: str = ""
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, dict[int, float]] = field(default_factory=dict)
    evaluations: list[trainer_pb2.Evaluation] = field(default_factory=list)
    evaluating: trainer_pb2.EvaluationProgress | None = None
    checkpoint: str = ""
    started: float = field(default_factory=time.time)
    step_times: list[float] = field(default_factory=list)

    def update(self, event: trainer_pb2.WatchRunResponse) -> None:
        """Take in one event."""
        match event.WhichOneof("event"):
            case "step":
                self._step(event)
            case "evaluation":
                self.evaluating = None
                self.evaluations.append(event.evaluation)
            case "evaluation_progress":
                self.evaluating = event.evaluation_progress
            case "checkpoint":
                self.checkpoint = event.checkpoint.path
            case "state":
                self.state, self.detail = event.state.state, event.state.detail

    def is_new(self, event: trainer_pb2.WatchRunResponse) -> bool:
        """Whether it happened since the run was started, or resumed."""
        return event.time.ToDatetime(datetime.UTC).timestamp() >= self.since

    def _step(self, event: trainer_pb2.WatchRunResponse) -> None:
        self.step, self.metrics = event.step.step, dict(event.step.metrics)
        for name, value in self.metrics.items():
            if name.startswith(REWARD_PREFIX) and name != REWARD_OF_ALL:
                self.rewards.setdefault(name.removeprefix(REWARD_PREFIX), {})[self.step] = value
        if self.is_new(event):
            self.step_times.append(event.time.ToDatetime(datetime.UTC).timestamp())

    @property
    def ended(self) -> bool:
        """Whether the run does not go on by itself."""
        return self.state in ENDED

    def seconds_left(self) -> float | None:
        """By the pace of the last steps; None before there is one. Evaluation after the last step is not in it."""
        recent = self.step_times[-_STEPS_FOR_SPEED:]
        if len(recent) < 2:
            return None
        return (self.total_steps - self.step) * (recent[-1] - recent[0]) / (len(recent) - 1)

    def before_and_after(self) -> tuple[trainer_pb2.Evaluation | None, trainer_pb2.Evaluation | None]:
        """The evaluation before training, and the latest after some step."""
        before = next((item for item in self.evaluations if item.step == 0), None)
        after = next((item for item in reversed(self.evaluations) if item.step > 0), None)
        return before, after


class LiveView:
    """A picture of the run that is drawn anew as it changes."""

    def __init__(self, state: RunState, console: Console) -> None:
        self._state, self._console = state, console
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)
        self._console.print(self._render())

    def updated(self, event: trainer_pb2.WatchRunResponse) -> None:
        """What an event changed is drawn at the next refresh; notices stay above the picture."""
        if event.WhichOneof("event") == "notice" and self._state.is_new(event):
            self._live.console.print(Text(event.notice.text, style="yellow"))

    def _render(self) -> RenderableType:
        state = self._state
        parts: list[RenderableType] = [self._head(), self._bar()]
        if state.rewards:
            parts.append(self._rewards())
        if state.metrics:
            parts.append(Text(_figures(state.metrics), style="dim"))
        return Group(*parts)

    def _head(self) -> Text:
        state = self._state
        text = Text.assemble(
            (state.run_id, "bold"), "  ", (state_name(state.state), _STATE_STYLES.get(state.state, ""))
        )
        if state.evaluating:
            text.append(
                f"  evaluating {_when(state.evaluating.step)}: {state.evaluating.done}/{state.evaluating.total}"
            )
        return text

    def _bar(self) -> RenderableType:
        state = self._state
        grid = Table.grid(padding=(0, 2, 0, 0))
        left = state.seconds_left()
        evaluating = state.evaluating
        done, total = (evaluating.done, evaluating.total) if evaluating else (state.step, state.total_steps)
        grid.add_row(
            ProgressBar(
                total=max(1, total),
                completed=done,
                width=_WIDTH + 8,
                style="grey23",
                complete_style="#5fafff",
                finished_style="#5fd787",
            ),
            f"step {state.step}/{state.total_steps}",
            f"{clock(time.time() - state.started)} so far",
            "" if left is None or state.ended else f"{clock(left)} left",
        )
        return grid

    def _rewards(self) -> Table:
        before, _ = self._state.before_and_after()
        grid = Table.grid(padding=(0, 2, 0, 0))
        for source, values in sorted(self._state.rewards.items()):
            held_out = accuracy.text(before, source)
            curve = list(values.values())
            used = self._state.metrics.get(TOOL_USE_PREFIX + source)
            grid.add_row(
                source,
                Text(f"{curve[-1]:.2f}", "bold"),
                Text(sparkline(curve), "green"),
                "" if used is None else f"tools {used:.0%}",
                Text(f"before training {held_out}" if held_out else "", "dim"),
            )
        return grid


class LogView:
    """One line an event, for logs and pipes."""

    def __init__(self, state: RunState, console: Console) -> None:
        self._state, self._console = state, console
        self._tenth = -1

    def __enter__(self) -> LogView:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def updated(self, event: trainer_pb2.WatchRunResponse) -> None:
        """Say what the event said, unless it is from before."""
        state = self._state
        if not state.is_new(event):
            return
        match event.WhichOneof("event"):
            case "step":
                left = state.seconds_left()
                rewards = "  ".join(
                    f"{name} {values[state.step]:.2f}"
                    for name, values in sorted(state.rewards.items())
                    if state.step in values
                )
                ending = "" if left is None else f"  {clock(left)} left"
                line = f"step {state.step}/{state.total_steps}  {rewards}  {_figures(state.metrics)}{ending}"
            case "evaluation":
                found = event.evaluation
                each = (f"{source} {accuracy.text(found, source)}" for source in accuracy.sources(found))
                line = f"evaluated {_when(found.step)}: {'  '.join(each)}"
            case "evaluation_progress":
                done = event.evaluation_progress
                if done.total == 0 or self._tenth == 10 * done.done // done.total:
                    return
                self._tenth = 10 * done.done // done.total
                line = f"evaluating {_when(done.step)}: {done.done}/{done.total}"
            case "checkpoint":
                line = f"checkpoint after step {event.checkpoint.step}: {event.checkpoint.path}"
            case "state":
                line = state_name(event.state.state) + (f": {event.state.detail}" if event.state.detail else "")
            case "notice":
                line = event.notice.text
            case _:
                return
        self._console.print(Text(line), soft_wrap=True)


_STATE_STYLES = {
    trainer_pb2.RUN_STATE_RUNNING: "green",
    trainer_pb2.RUN_STATE_FINISHED: "bold green",
    trainer_pb2.RUN_STATE_FAILED: "bold red",
    trainer_pb2.RUN_STATE_STOPPED: "yellow",
}


def state_name(state: trainer_pb2.RunState.ValueType) -> str:
    """As `running`."""
    return short_name(trainer_pb2.RunState, state).lower()


def sparkline(values: list[float], width: int = _WIDTH) -> str:
    """A curve of values in [0, 1] in one line of text; each bar is the mean of its share of the values."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join(_BARS[max(0, min(len(_BARS) - 1, int(value * len(_BARS))))] for value in values)


def clock(seconds: float) -> str:
    """As 1:05 or 2:03:09."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _when(step: int) -> str:
    return "before training" if step == 0 else f"after step {step}"


def _figures(metrics: Mapping[str, float]) -> str:
    """The line of figures under the rewards: those that the trainer sent."""
    parts = []
    if TOOL_USE in metrics:
        parts.append(f"tool use {metrics[TOOL_USE]:.0%}")
    if TOKENS_PER_SECOND in metrics:
        parts.append(f"{metrics[TOKENS_PER_SECOND]:,.0f} tokens/s")
    if STALENESS in metrics:
        parts.append(f"staleness {metrics[STALENESS]:.2f}")
    if STEP_SECONDS in metrics:
        named = (
            (name.removeprefix(_TIME_PREFIX).removesuffix(_TIME_SUFFIX).replace("_", " "), value)
            for name, value in metrics.items()
            if name.startswith(_TIME_PREFIX) and name != STEP_SECONDS
        )
        longest = sorted(named, key=lambda item: -item[1])[:3]
        split = ", ".join(f"{name} {value:.1f}" for name, value in longest if value >= 0.05)
        parts.append(f"step {metrics[STEP_SECONDS]:.1f} s" + (f" ({split})" if split else ""))
    return "  ".join(parts)
