"""Turns the SmolLM2 GGUF file into a model directory that transformers loads without `gguf`.

Called by `scripts/get-smollm2` with a Python that has numpy. The same file gives the same bytes on every machine:
the arithmetic is one multiplication and one addition in fp32, rounded once to bfloat16, the checkpoint's own type.
Transformers' GGUF loader is not used: it needs torch, keeps the model marked as quantized, so that it cannot be
saved, and drops the tokenizer's splitting of digits.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
# ruff: noqa: D102, D103 - each function is named after what it makes

import json
import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
GGUF_VERSION = 3
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCK_BYTES = {Q4_1: 20, Q8_0: 34}
BLOCK_VALUES = 32
CONTROL_TOKEN = 3

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Tensor(NamedTuple):
    """Where a tensor lies in the file; `shape` is outermost first, as torch counts."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class Reader:
    """Reads GGUF's header from left to right."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.position)
        self.position += struct.calcsize(code)
        return value

    def text(self) -> str:
        length = self.scalar("<Q")
        self.position += length
        return self.data[self.position - length : self.position].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.scalar("<I"), self.scalar("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.scalar(SCALARS[kind])

    def header(self) -> tuple[dict[str, Any], list[Tensor]]:
        if self.data[:4] != b"GGUF":
            raise ValueError("not a GGUF file")
        self.position = 4
        if (version := self.scalar("<I")) != GGUF_VERSION:
            raise ValueError(f"GGUF version {version}, expected {GGUF_VERSION}")
        tensor_count, pair_count = self.scalar("<Q"), self.scalar("<Q")
        fields = {}
        for _ in range(pair_count):
            key = self.text()
            fields[key] = self.value(self.scalar("<I"))
        tensors = [self.tensor() for _ in range(tensor_count)]
        alignment = fields.get("general.alignment", 32)
        start = -(-self.position // alignment) * alignment
        return fields, [tensor._replace(offset=start + tensor.offset) for tensor in tensors]

    def tensor(self) -> Tensor:
        name = self.text()
        shape = tuple(self.scalar("<Q") for _ in range(self.scalar("<I")))
        return Tensor(name, shape[::-1], self.scalar("<I"), self.scalar("<Q"))


def dequantize(data: mmap.mmap, tensor: Tensor) -> Floats:
    count = int(np.prod(tensor.shape))
    if tensor.kind == F32:
        return np.frombuffer(data, "<f4", count, tensor.offset).reshape(tensor.shape)
    if tensor.kind not in BLOCK_BYTES:
        raise ValueError(f"{tensor.name}: GGML type {tensor.kind} is not one of {[F32, *BLOCK_BYTES]}")
    width = BLOCK_BYTES[tensor.kind]
    blocks = np.frombuffer(data, np.uint8, count // BLOCK_VALUES * width, tensor.offset).reshape(-1, width)
    values = q4_1(blocks) if tensor.kind == Q4_1 else q8_0(blocks)
    return values.reshape(tensor.shape)


def half(column: Bytes) -> Floats:
    return np.ascontiguousarray(column).view("<f2").astype(np.float32)


def q4_1(blocks: Bytes) -> Floats:
    nibbles = np.concatenate([blocks[:, 4:] & 0x0F, blocks[:, 4:] >> 4], axis=1)
    return nibbles.astype(np.float32) * half(blocks[:, 0:2]) + half(blocks[:, 2:4])


def q8_0(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * half(blocks[:, 0:2])


def bfloat16_bytes(values: Floats) -> bytes:
    """Rounded to nearest, ties to even; no NaN comes out of a GGUF block."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def split_rotary(weight: Floats, heads: int) -> Floats:
    """Undo llama.cpp's interleaving of the rotary pairs: its conversion permutes the rows of q and k."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def torch_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in OUTER:
        return f"{OUTER[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{INNER[part]}.weight"


def weights(data: mmap.mmap, fields: dict[str, Any], tensors: list[Tensor]) -> Iterator[bytes]:
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in tensors:
        values = dequantize(data, tensor)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = split_rotary(values, heads[part])
        yield bfloat16_bytes(values)


def write_safetensors(path: Path, data: mmap.mmap, fields: dict[str, Any], tensors: list[Tensor]) -> None:
    """Write the format of https://github.com/huggingface/safetensors#format, tensors by name."""
    ordered = sorted(tensors, key=lambda tensor: torch_name(tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + 2 * int(np.prod(tensor.shape))
        header[torch_name(tensor.name)] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for content in weights(data, fields, ordered):
            file.write(content)


def config(fields: dict[str, Any]) -> dict[str, Any]:
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["bos"],
        "dtype": "bfloat16",
        "eos_token_id": ids["eos"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "initializer_range": 0.041666666666666664,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": ids["padding"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_theta": fields["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **plain}
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()},
    }


def generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: fields[f"tokenizer.ggml.{name}_token_id"] for key, name in names.items()}


def convert(gguf: Path, folder: Path) -> None:
    with gguf.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    fields, tensors = Reader(data).header()
    folder.mkdir(parents=True, exist_ok=True)
    documents = {
        "config.json": config(fields),
        "generation_config.json": generation_config(fields),
        "tokenizer.json": tokenizer(fields),
        "tokenizer_config.json": tokenizer_config(fields),
    }
    for name, document in documents.items():
        text = json.dumps(document, ensure_ascii=False, indent=2)
        (folder / name).write_text(text + "\n", encoding="utf-8", newline="\n")
    template = fields["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="\n")
    write_safetensors(folder / "model.safetensors", data, fields, tensors)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
