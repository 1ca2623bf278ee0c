"""A tiny base with random weights, a word tokenizer with a chat template, and conversations whose loss can fall."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = [f"w{number}" for number in range(40)]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|> {% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }} <|end|> {% endgeneration %}{% else %}{{ message['content'] }} <|end|> {% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
FORGETFUL = (  # shows what the assistant said only in the last turn
    "{% for message in messages %}<|{{ message['role'] }}|> "
    "{% if message['role'] == 'assistant' and not loop.last %}w0{% else %}{{ message['content'] }}{% endif %} <|end|> "
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
SPECIALS = ["<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<unk>"]


def tokenizer(template: str | None = TEMPLATE):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate([*SPECIALS, *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def base(folder: Path, *, layers: int = 2, hidden: int = 32, template: str | None = TEMPLATE) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


def conversations(path: Path, count: int = 24) -> Path:
    """The assistant says the user's words again."""
    lines = []
    for number in range(count):
        said = " ".join(WORDS[(number * 7 + place) % len(WORDS)] for place in range(4 + number % 5))
        messages = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path
