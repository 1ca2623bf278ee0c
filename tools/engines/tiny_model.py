"""A Llama of four layers with random weights, large enough that attention matters and tops are apart; its tokenizer
has one word per id. Made in seconds, no download. Runs inside the engines' environment: `tiny_model.py FOLDER [SIZE OF
A HEAD]`; larger heads make a larger KV cache of the same few tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCABULARY = 1024


def make(folder: Path, head_dim: int) -> Path:
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=head_dim,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.0 if "embed" in name else 2.0 / weight.shape[1] ** 0.5)
    words = {f"t{number}": number for number in range(3, VOCABULARY)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 32))
