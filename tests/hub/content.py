"""Models, a tokenizer and a dataset small enough for tests, under real names and in the real file formats.

Everything is written by hand from a seed: this side has no torch, no transformers, no datasets.
"""

from __future__ import annotations

import json
import random
import struct
from typing import Any

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte (https://github.com/openai/gpt-2/blob/master/src/encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


def tokenizer_files() -> dict[str, bytes]:
    """A byte-level BPE with no merges: 256 bytes and Qwen's special tokens."""
    vocabulary = {token: index for index, token in enumerate(byte_alphabet())}
    added = [
        {
            "id": len(vocabulary) + index,
            "content": token,
            "special": token.startswith("<|"),
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for index, token in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            **bpe,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        },
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": to_json(tokenizer),
        "tokenizer_config.json": to_json(config),
        "vocab.json": to_json(vocabulary),
        "merges.txt": b"#version: 0.2\n",
    }


def to_json(value: object) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def bfloat16(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


def safetensors(tensors: dict[str, tuple[int, ...]], numbers: random.Random) -> bytes:
    """Normal numbers for matrices, ones for vectors; the format is https://github.com/huggingface/safetensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, shape in sorted(tensors.items()):
        start, count = len(body), 1
        for size in shape:
            count *= size
        body += b"".join(bfloat16(numbers.gauss(0, 0.05) if len(shape) > 1 else 1.0) for _ in range(count))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, len(body)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(body)


def qwen3_config(*, tied: bool) -> dict[str, Any]:
    """Qwen3's shape with four query heads on two key heads, every size tiny."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 264,
    }


def qwen3_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    inner, vocabulary = config["intermediate_size"], config["vocab_size"]
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    tensors["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        tensors |= {
            f"{block}.input_layernorm.weight": (hidden,),
            f"{block}.post_attention_layernorm.weight": (hidden,),
            f"{block}.self_attn.q_norm.weight": (head,),
            f"{block}.self_attn.k_norm.weight": (head,),
            f"{block}.self_attn.q_proj.weight": (queries, hidden),
            f"{block}.self_attn.k_proj.weight": (keys, hidden),
            f"{block}.self_attn.v_proj.weight": (keys, hidden),
            f"{block}.self_attn.o_proj.weight": (hidden, queries),
            f"{block}.mlp.gate_proj.weight": (inner, hidden),
            f"{block}.mlp.up_proj.weight": (inner, hidden),
            f"{block}.mlp.down_proj.weight": (hidden, inner),
        }
    return tensors


def qwen3_files(*, seed: int, shards: int = 1, tied: bool = False) -> dict[str, bytes]:
    """A whole model repository; more than one shard comes with its index."""
    config = qwen3_config(tied=tied)
    tensors = qwen3_tensors(config)
    numbers = random.Random(seed)  # noqa: S311 - weights, not secrets
    files = {"config.json": to_json(config), **tokenizer_files()}
    generation = {"eos_token_id": [258, 256], "pad_token_id": 256, "do_sample": False}
    files["generation_config.json"] = to_json(generation)
    files["README.md"] = b"---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n# A tiny random Qwen3\n"
    files["LICENSE"] = b"Apache License, Version 2.0\n"
    if shards == 1:
        return files | {"model.safetensors": safetensors(tensors, numbers)}
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = {name: tensors[name] for name in names[shard::shards]}
        weight_map |= dict.fromkeys(held, file)
        files[file] = safetensors(held, numbers)
    total = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return files | {"model.safetensors.index.json": to_json(index)}


def conversation(number: int) -> list[dict[str, str]]:
    """Two turns about sums, so that every row differs and can be checked by eye."""
    left, right = number * 7 % 23, number * 5 % 19
    return [
        {"role": "user", "content": f"What is {left} plus {right}?"},
        {"role": "assistant", "content": f"{left} plus {right} is {left + right}."},
        {"role": "user", "content": "And twice that?"},
        {"role": "assistant", "content": f"Twice that is {2 * (left + right)}."},
    ]


def chat_rows(first: int, count: int) -> bytes:
    """JSON Lines, one conversation a row."""
    rows = [{"source": "sums", "messages": conversation(number)} for number in range(first, first + count)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def capybara_files(*, rows: int = 48) -> dict[str, bytes]:
    """A chat dataset with a train and a test split."""
    card = (
        "---\nlicense: apache-2.0\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: train\n    path: data/train-*\n  - split: test\n    path: data/test-*\n---\n# Sums, as chats\n"
    )
    return {
        "README.md": card.encode(),
        "data/train-00000-of-00001.jsonl": chat_rows(0, rows),
        "data/test-00000-of-00001.jsonl": chat_rows(1000, 8),
    }
