"""Tiny random models of every family, saved as Hugging Face folders, for tests.

Weights come from `transformers` with an initializer range of 0.2 (smaller ones hide errors of position), and
norms and biases are random too, so that a weight which is not applied shows in the logits.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

Family = Literal["llama", "llama3", "qwen2", "qwen3"]

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are terse.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_CORPUS = [
    "The ship left the harbour before dawn, and nobody on the pier waved; the captain had asked them not to.",
    "DOCUMENT: This review is about a film. Sentiment: positive or negative? ANSWER: TRUE FALSE yes no",
    "Rain fell on the roofs of the old town while 27 people stood under one umbrella and laughed about 1984.",
    "I didn't expect much, but the acting was wonderful, the music moving, and the ending quite surprising.",
    "Permission is hereby granted, free of charge, to any person obtaining a copy of this software.",
    "system user assistant You are terse. Does this text discuss the weather? Is the author happy with it?",
    "It was a dull, slow, tired story: nothing happened, everyone complained, and then it happened again.",
]


def tiny_tokenizer(vocab: int) -> tokenizers.Tokenizer:
    """A byte-level BPE with the three control tokens first and at most `vocab` tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


@functools.cache
def _tokenizer_json(vocab: int) -> str:
    return tiny_tokenizer(vocab).to_str(pretty=False)


def _hf_model(family: Family, settings: dict[str, Any]) -> Any:
    import transformers

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    match family:
        case "llama" | "llama3":
            rope = LLAMA3_ROPE if family == "llama3" else rope
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, rope_parameters=rope))
        case "qwen2":
            settings.pop("head_dim")
            return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings, rope_parameters=rope))
        case "qwen3":
            return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings, rope_parameters=rope))


def make_tiny(
    folder: Path,
    family: Family,
    *,
    tied: bool = True,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab: int = 512,
    context: int = 2048,
    shard_bytes: int | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write a tiny random float32 model with its tokenizer and chat template into `folder`, and return it.

    Args:
        folder: made if it does not exist.
        family: "llama3" is a llama with the Llama-3 rotary scaling.
        tied: whether the head shares the embedding.
        seed: of the weights.
        head_dim: size of one head; `hidden / heads` when None (always so for qwen2).
        vocab: rows of the embedding; the tokenizer has at most as many tokens.
        context: the longest prompt in tokens.
        shard_bytes: write several safetensors files of at most this size.
        settings: more fields of the `transformers` config, e.g. `{"attention_bias": True}`.
    """
    import torch

    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim if head_dim is not None else hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 2,
        **(settings or {}),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _hf_model(family, fields)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith(".bias"):
                    parameter.normal_(std=0.5)
    folder.mkdir(parents=True, exist_ok=True)
    shards = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.save_pretrained(folder, **shards)
    (folder / "tokenizer.json").write_text(_tokenizer_json(vocab), encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    return folder
