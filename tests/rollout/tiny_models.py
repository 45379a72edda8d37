"""Small random models with tokenizers of their own, for tests that need real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}{% set role = 'ipython' if message['role'] == 'tool' else "
    "message['role'] %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + message['content'] | trim + "
    "'<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
TOOL_RESPONSE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + message['content'] + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TINY = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
FORGETS_THOUGHTS = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SEES = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""As SmolVLM's: it shows contents that are lists of parts, and nothing of a content that is text."""
NUMBERS_TURNS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' + (messages | length | string) + '\n' + "
    "message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_TOOL_ROLE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tool role') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"),
)

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Qwen's pattern, but for contractions."""

_CORPUS = [
    "the cat sat on the mat and what is 17 times 23? print(17*23) 391",
    "select name from towns; user assistant tool system",
    "naïve café, 東京 and emoji 🙂 are text as well <python> </python> <answer> </answer>",
    "[1] Title: text\n\n\tdef f(x): return x",
]


def make_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE as Llama 3 and Qwen have it: several tokens to a word, some tokens inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool_response>", normalized=False, special=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", extra_special_tokens=list(SPECIAL)
    )
    fast.chat_template = template
    return fast


def make_config(kind: str, vocabulary: int, **changes: Any) -> Any:
    """Three architectures, with grouped queries; Qwen2 has biases, Qwen3 norms its heads."""
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.25,
    }
    if kind == "qwen3":
        shape["head_dim"] = 16
    kinds = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    return kinds[kind](**{**shape, **changes})


def make_model(folder: Path, kind: str = "llama", template: str = CHATML, seed: int = 0, **changes: Any) -> Path:
    """Save a random model and a tokenizer to a folder, as a user's model lies there."""
    tokenizer = make_tokenizer(template)
    torch.manual_seed(seed)
    config = make_config(kind, len(tokenizer) + 4, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_adapter(folder: Path, weights: dict[str, torch.Tensor], rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Save a random LoRA adapter over every projection, as peft lays it out; gives what it adds to which weight.

    What it adds is small beside the weights: a model of larger ones is so steep that rounding alone exceeds tolerances.
    """
    generator = torch.Generator().manual_seed(seed)
    files, added = {}, {}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        size_out, size_in = weights[name].shape
        down, up = (torch.randn(shape, generator=generator) * 0.1 for shape in ((rank, size_in), (size_out, rank)))
        place = f"base_model.model.{name.removesuffix('.weight')}"
        files |= {f"{place}.lora_A.weight": down, f"{place}.lora_B.weight": up}
        added[name] = 2 * up @ down
    targets = sorted({name.split(".")[-2] for name in added})
    folder.mkdir()
    save_file(files, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return added


def make_seeing_model(folder: Path) -> Path:
    """Save a random Idefics3, which reads images, with its processor: an image becomes four tokens and three around."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor  # noqa: PLC0415 - slow
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil  # noqa: PLC0415

    tokenizer = make_tokenizer(SEES)
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_tokens(marks, special_tokens=True)
    text = make_config("llama", len(tokenizer) + 4, head_dim=32, tie_word_embeddings=False)
    eyes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        vision_config={**eyes, "image_size": 56, "patch_size": 14},
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and ("vision_model" in name or "connector" in name):
            torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(folder)
    edge = {"longest_edge": 56}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=SEES).save_pretrained(folder)
    return folder
