"""Builds the demo's policy: a character-level Llama of 1.8 M weights, warmed up on synthetic demonstrations.

    python examples/tiny_policy/build.py              # build and measure it: examples/tiny_policy/model
    python examples/tiny_policy/build.py --evaluate   # measure the model that is there

The demonstrations are those of a policy that *mostly guesses*: in the end in `SETTLED_GUESS_SHARE` of them it answers
at once with a plausible wrong answer, in the rest it calls the right tool and answers from the observation. The
result knows how to use each tool and seldom does so, which is what reinforcement learning is then to
change. Demonstrations come from the train split: no held-out task is seen here.

Two stages: `WARM_UP` teaches the tools, and `SETTLE`, short and at a small learning rate, fixes how often it guesses.
`--settle` runs the second alone, on the model that is there.

The model directory is replaced file by file with `os.replace`, so a reader never sees half a file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_policy.measure import evaluate, observe, report
from trainer_service.data.demo_tasks import DOMAINS, generate, random_name
from trainer_service.data.task import Task

MODEL_DIR: Final = Path(__file__).resolve().parent / "model"
EARLY_GUESS_SHARE: Final = 0.15
"""Share of guesses in the first half of the warm-up: a guess teaches nothing about copying, and its digits are noise in
the gradient."""
GUESS_SHARE: Final = 0.6
"""In the last third of the warm-up."""
SETTLED_GUESS_SHARE: Final = 0.7
"""When it settles: what the policy then does."""
CHARACTERS: Final = "\n\t" + "".join(chr(code) for code in range(32, 127))
SPECIAL: Final = ("<|pad|>", "<|unk|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>")
TAGS: Final = tuple(f"<{slash}{name}>" for name in ("python", "sql", "search", "answer") for slash in ("", "/"))
CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('unknown role ' + message['role']) -}}{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


MODEL_CARD: Final = """\
# Turnwire's tiny policy

A character-level Llama with {parameters:,} weights (float32, tied embeddings), from which `make demo` starts. It
knows how to call `python`, `sql` and `search`, and mostly does not: it guesses. Reinforcement learning is to
change that.

Built by `python examples/tiny_policy/build.py --seed {seed} --steps {steps} --threads 1`, about half an hour on a
busy two-core CPU, from synthetic demonstrations of the train split alone. In a share of them the answer is a wrong
guess: {early_share} in the first half of the {steps} steps, {guess_share} in their last third, {settled_share} in
the {settle_steps} steps that follow, which is what the policy then does. In the rest the right tools are called, one
a turn, and the answer is read from the observation.

Measured on {tasks} held-out tasks a domain, sampled at temperature 1, tools executed for real:

| domain | accuracy | uses a tool | accuracy after the right tool's opening tag | tokens a trajectory | longest |
|---|---|---|---|---|---|
{table}

Tokens: printable ASCII, newline and tab one each, anything else `<|unk|>`; `<|user|>`, `<|assistant|>`, `<|tool|>`,
`<|system|>`, `<|end|>` (end of turn) and `<|pad|>` are special; `<python>`, `<sql>`, `<search>`, `<answer>` and
their closing tags are one token each and not special, so that they survive `skip_special_tokens`. No BOS.

Good for nothing but the demo and tests. `figures.json` holds the figures in full. Licence: that of the repository.
"""


# -- tokenizer and model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: an observation tokenized on its own is what it would be inside the whole text.

    The tags are single tokens but not special: they are the action's text and survive `skip_special_tokens`.
    """
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *TAGS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        extra_special_tokens=["<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Six heads of 32: some look at the previous character, some find the place to copy from.

    The weights start at 0.06 rather than the usual 0.02: attention of so narrow a model then starts far enough from
    uniform to find copying within 150 steps; at 0.02 it had not after 320.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=512,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|pad|>"),
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def model_card(figures: dict[str, Any]) -> str:
    """The model directory's README, written with the weights so that its figures are always theirs."""
    rows = [
        "| {} | {accuracy:.3f} | {tool_use:.3f} | {began_right:.3f} | {tokens:.0f} | {longest:.0f} |".format(
            domain, **sampled, began_right=figures["with_tool_forced"][domain]["accuracy_with_tool"]
        )
        for domain, sampled in figures["sampled"].items()
    ]
    shares = {"early_share": EARLY_GUESS_SHARE, "guess_share": GUESS_SHARE, "settled_share": SETTLED_GUESS_SHARE}
    return MODEL_CARD.format(table="\n".join(rows), settle_steps=SETTLE.steps, **shares, **figures)


def _null_for_nan(value: Any) -> Any:
    """JSON has no NaN: a mean of nothing is null there."""
    if isinstance(value, dict):
        return {key: _null_for_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, figures: dict[str, Any]) -> None:
    """Writes beside the model directory, then moves each file into it."""
    MODEL_DIR.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODEL_DIR.parent) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        written = json.dumps(_null_for_nan(figures), indent=2, allow_nan=False)
        (Path(scratch) / "figures.json").write_text(written + "\n")
        (Path(scratch) / "README.md").write_text(model_card(figures))
        for file in sorted(Path(scratch).iterdir()):
            file.chmod(0o644)
            os.replace(file, MODEL_DIR / file.name)


# -- demonstrations


def wrong_answer(task: Task, rng: random.Random) -> str:
    """A guess: of the right form, about the right size, and wrong."""
    truth = str(task.ground_truth)
    while True:
        if truth.lstrip("-").isdigit():
            digits = len(truth.lstrip("-"))
            guess = str(rng.randint(10 ** (digits - 1), 10**digits - 1))
        else:
            guess = random_name(rng)
        if guess != truth:
            return guess


def demonstration(task: Task, rng: random.Random, guess_share: float) -> list[dict[str, str]]:
    """The messages of one demonstrated trajectory, one call an assistant turn."""
    messages = [{"role": message.role, "content": message.content} for message in task.messages]
    answer = str(task.ground_truth)
    if rng.random() < guess_share:
        answer = wrong_answer(task, rng)
    else:
        for tool, text in task.extra["calls"]:
            messages.append({"role": "assistant", "content": f"<{tool}>{text}</{tool}>"})
            messages.append({"role": "tool", "content": observe(task, tool, text)})
    messages.append({"role": "assistant", "content": f"<answer>{answer}</answer>"})
    return messages


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Token ids and labels; a label is -100 unless the token is the assistant's own."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        opening, *rest = tokenizer.encode(f"<|{message['role']}|>{message['content']}<|end|>")
        ids += [opening, *rest]
        labels += [-100, *(rest if message["role"] == "assistant" else [-100] * len(rest))]
    return ids, labels


# -- training


@dataclass(frozen=True)
class Training:
    """Hyper-parameters of a stage."""

    steps: int
    learning_rate: float
    warmup: int
    early_guess_share: float
    guess_share: float
    first_demonstration: int = 0
    """Number of its first demonstration: no stage sees another one's."""
    batch: int = 66
    """Demonstrations a step, shared evenly by the domains."""
    micro_batches: int = 3
    """A step's demonstrations are sorted by length and cut into this many: little is spent on padding."""


WARM_UP: Final = Training(1100, 2e-3, 50, EARLY_GUESS_SHARE, GUESS_SHARE)
SETTLE: Final = Training(120, 3e-4, 10, SETTLED_GUESS_SHARE, SETTLED_GUESS_SHARE, first_demonstration=10_000_000)


def learning_rate(config: Training, step: int) -> float:
    """Linear warm-up, then half a cosine down to 2 %."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def guess_share(config: Training, step: int) -> float:
    """The early one for half of the steps, then rising to the other by two thirds."""
    risen = min(1.0, max(0.0, (step / config.steps - 0.5) * 6))
    return config.early_guess_share + (config.guess_share - config.early_guess_share) * risen


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: Training,
    seed: int,
    evaluate_every: int,
) -> None:
    """Next-token training on demonstrations, each seen once; the loss is the mean over assistant tokens."""
    rng = random.Random(seed)
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98))
    started, losses = time.monotonic(), []
    model.train()
    for step in range(config.steps):
        examples = []
        for row in range(config.batch):
            task = generate(
                DOMAINS[row % len(DOMAINS)], "train", config.first_demonstration + step * config.batch + row, seed
            )
            examples.append(encode(tokenizer, demonstration(task, rng, guess_share(config, step))))
        examples.sort(key=lambda example: len(example[0]))
        targets = sum(label != -100 for _, labels in examples for label in labels)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        total, size = 0.0, config.batch // config.micro_batches
        for start in range(0, config.batch, size):
            ids_BT, labels_BT = (
                torch.nn.utils.rnn.pad_sequence(
                    [torch.tensor(example[part]) for example in examples[start : start + size]],
                    batch_first=True,
                    padding_value=filler,
                )
                for part, filler in ((0, 0), (1, -100))
            )
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
            wanted = labels_BT[:, 1:] != -100
            loss = torch.nn.functional.cross_entropy(logits_BTV[wanted], labels_BT[:, 1:][wanted], reduction="sum")
            (loss / targets).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / targets
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        if (step + 1) % 20 == 0:
            seconds = time.monotonic() - started
            left = seconds / (step + 1) * (config.steps - step - 1)
            mean = sum(losses[-20:]) / 20
            progress = f"step {step + 1}/{config.steps}  loss {mean:.4f}  {seconds:.0f} s, {left:.0f} s left"
            print(progress, flush=True)
        if (step + 1) % evaluate_every == 0 and step + 1 < config.steps:
            report(evaluate(model, tokenizer, 60, seed))
            model.train()


def main() -> None:
    """Builds, or measures what was built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=WARM_UP.steps, help="of the warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", action="store_true", help="measure the model there is")
    parser.add_argument("--settle", action="store_true", help="only the second stage, on the model there is")
    parser.add_argument("--tasks", type=int, default=400, help="held-out tasks a domain to measure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    started = time.monotonic()
    if options.evaluate or options.settle:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
        model = LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    else:
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        train(model, tokenizer, replace(WARM_UP, steps=options.steps), options.seed, evaluate_every=400)
    if not options.evaluate:
        train(model, tokenizer, SETTLE, options.seed, evaluate_every=400)
    built = time.monotonic() - started
    figures: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seed": options.seed,
        "tasks": options.tasks,
        "sampled": evaluate(model, tokenizer, options.tasks, options.seed),
        "with_tool_forced": evaluate(model, tokenizer, options.tasks, options.seed + 1, force_tool=True),
    }
    print(f"{figures['parameters']} parameters, {built:.0f} s")
    for kind in ("sampled", "with_tool_forced"):
        print(kind)
        report(figures[kind])
    if not options.evaluate:
        save(model, tokenizer, figures | {"steps": options.steps})


if __name__ == "__main__":
    main()
