"""A trajectory as a picture in text: what the policy wrote, what came back, in different colours, as training sees it.

Colour is never the only sign: every part has its label, and `--tokens` shows the mask as numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from turnwire.cli import output
from turnwire.cli.records import Record, Segment, Turn

PROMPT, OBSERVATION, BRIDGE = "#a8a8a8", "bold #5fafff", "#767676"
_ACTION_STYLES = ((-0.1, "#5fd787"), (-0.7, "#d7d75f"), (-2.3, "#ffaf5f"), (float("-inf"), "bold #ff5f5f"))
"""Actions by log-probability: above 0.9, 0.5, 0.1, and below."""
_STOPS = {"STRING": "stop string", "END_OF_TURN": "end of turn", "LENGTH": "length limit"}


def show(record: Record, *, tokens: bool = False) -> RenderableType:
    """The whole trajectory; `tokens` adds a table with one line a token."""
    parts: list[RenderableType] = [_head(record)]
    for segment in record["segments"]:
        parts += _segment(segment, record)
        if tokens:
            parts.append(_token_table(segment))
    parts.append(_end(record))
    return Group(*parts)


def legend() -> Text:
    """What the colours mean."""
    text = Text("action tokens by probability: ")
    for (_, style), label in zip(_ACTION_STYLES, ("> 0.9", "> 0.5", "> 0.1", "less"), strict=True):
        text.append(f" {label} ", style)
    text.append(" observations ", OBSERVATION)
    text.append(" prompt ", PROMPT)
    text.append(" template ", BRIDGE)
    return text


def _head(record: Record) -> RenderableType:
    reward = record["reward"]
    facts = Text.assemble(
        (record["data_source"], "bold"),
        f"  {'evaluation' if record['kind'] == 'eval' else 'training'} after {record['step']} updates  reward ",
        (f"{reward:.2f}", "bold green" if reward >= 1 else "bold red" if reward <= 0 else "bold yellow"),
    )
    if record["advantage"] is not None:
        facts.append(f"  advantage {record['advantage']:+.2f}")
    if record["filtered"]:
        facts.append(f"  not trained on: {record['filtered']}", "yellow")
    facts.append(f"\n{record['trajectory_id']}  tools: {', '.join(record['tools']) or 'none'}", "dim")
    return Panel(facts, expand=True, border_style="grey42")


def _segment(segment: Segment, record: Record) -> Iterator[RenderableType]:
    prompt = segment["prompt_length"]
    yield _row("prompt", _prompt_text(segment, prompt), "")
    for turn in segment["turns"]:
        yield _turn_line(segment, turn)
        yield _row("action", _text(segment, turn["action_start"], turn["action_end"]), "")
        if turn["observation_end"] > turn["action_end"]:
            label = ", ".join(dict.fromkeys(result["tool"] for result in turn["results"])) or "answer"
            yield _row(label, _observation(segment, turn), _results(turn))


def _turn_line(segment: Segment, turn: Turn) -> RenderableType:
    start, end = turn["action_start"], turn["action_end"]
    logprobs = segment["logprobs"][start:end]
    versions = sorted({version for first, last, version in segment["weight_versions"] if first < end and last > start})
    facts = [
        f"{end - start} tokens in {_seconds(turn['generate_seconds'])}",
        f"ended by {_STOPS.get(turn['generate_stop'], turn['generate_stop'])}",
        f"mean logprob {sum(logprobs) / max(1, len(logprobs)):.3f}",
        f"weights after {', '.join(map(str, versions))} updates",
    ]
    text = Text.assemble((f"turn {turn['index']}", "bold"), f"  {', '.join(facts)}", style="dim")
    return Padding(text, (1, 0, 0, 1))


def _results(turn: Turn) -> Text:
    text = Text(style="dim")
    for result in turn["results"]:
        text.append(f"{result['tool']} {_seconds(result['seconds'])}")
        if result["error"]:
            text.append(f" {result['error']}", "red")
        if result["truncated"]:
            text.append(" cut", "yellow")
        text.append("\n")
    text.append(f"round trip {_seconds(turn['tool_seconds'])}")
    if turn["observation_full_tokens"]:
        text.append(f"\ncut from {turn['observation_full_tokens']} tokens", "yellow")
    return text


def _prompt_text(segment: Segment, end: int) -> Text:
    return Text("".join(segment["tokens"][:end]), PROMPT)


def _text(segment: Segment, start: int, end: int) -> Text:
    """Action tokens, each coloured by its log-probability."""
    text = Text()
    for position in range(start, end):
        text.append(segment["tokens"][position], action_style(segment["logprobs"][position]))
    return text


def _observation(segment: Segment, turn: Turn) -> Text:
    """Observation tokens, with the template's tokens around them dimmed."""
    text = Text("".join(segment["tokens"][turn["action_end"] : turn["observation_end"]]), BRIDGE)
    if turn["observation"] and (place := text.plain.find(turn["observation"])) >= 0:
        text.stylize(OBSERVATION, place, place + len(turn["observation"]))
    else:  # cut, or decoded differently token by token
        text.stylize(OBSERVATION)
    return text


def action_style(logprob: float) -> str:
    """Colour of an action token."""
    return next(style for least, style in _ACTION_STYLES if logprob >= least)


def _row(label: str, text: Text, note: RenderableType) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=8, style="bold")
    grid.add_column(ratio=1, overflow="fold")
    grid.add_column(justify="right")
    grid.add_row(label, text, note)
    return Padding(grid, (0, 0, 0, 1))


def _end(record: Record) -> RenderableType:
    answer, truth = record["final_answer"], record["ground_truth"]
    trained = sum(sum(segment["loss_mask"]) for segment in record["segments"])
    total = sum(len(segment["loss_mask"]) for segment in record["segments"])
    text = Text.assemble(
        ("answer ", "bold"),
        ("none" if answer is None else repr(answer), "green" if record["reward"] >= 1 else "red"),
        f"  truth {truth!r}  ended by {record['stop_reason']} after {_seconds(record['seconds'])}",
        f"  mask 1 at {trained} of {total} tokens",
    )
    for name, value in record["reward_parts"].items():
        text.append(f"  {name} {value:.2f}", "dim")
    return Group(Rule(style="grey30"), Padding(text, (0, 0, 0, 1)))


def _token_table(segment: Segment) -> RenderableType:
    table = output.table(">at", ">id", "token", "part", ">mask", ">logprob", ">weights")
    parts = ["prompt"] * segment["prompt_length"] + ["observation"] * (
        len(segment["tokens"]) - segment["prompt_length"]
    )
    for turn in segment["turns"]:
        parts[turn["action_start"] : turn["action_end"]] = [f"action {turn['index']}"] * (
            turn["action_end"] - turn["action_start"]
        )
    versions: dict[int, int] = {}
    for start, end, version in segment["weight_versions"]:
        versions.update(dict.fromkeys(range(start, end), version))
    for position, token in enumerate(segment["tokens"]):
        sampled, logprob = segment["loss_mask"][position] == 1, segment["logprobs"][position]
        part = parts[position]
        style = action_style(logprob) if sampled else PROMPT if part == "prompt" else OBSERVATION
        table.add_row(
            str(position),
            str(segment["token_ids"][position]),
            Text(repr(token)[1:-1], style),
            part,
            str(segment["loss_mask"][position]),
            f"{logprob:.3f}" if sampled else "",
            str(versions.get(position, "")),
        )
    return table


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value:.2f} s"
