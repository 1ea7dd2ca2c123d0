#!/usr/bin/env python3
"""Writes `tiny-tokenizer/`, the byte-level BPE tokenizer of the tiny recipe, learned from the training commands.

Stands before the flow, after `make_commands.py`, whose training file it reads. Nothing but the standard library is
used, and equal counts are settled by the bytes, so every machine makes the same file.
`--check` writes nothing and says whether the committed files are those that this script makes.
"""
# ruff: noqa: D103 - each function is named after what it makes

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from make_commands import TRAIN_FILE, differences, write

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE / "chatml.jinja"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 448
MODEL_MAX_LENGTH = 256

# The splits of `Digits` and `ByteLevel` below, for the ASCII text that this set consists of.
PIECES = re.compile(r"'(?:s|t|re|ve|m|ll|d)|\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+")

Word = tuple[str, ...]
Pair = tuple[str, str]


def byte_names() -> list[str]:
    """GPT-2's printable name of each byte.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    kept = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(spare)) for byte in range(256)]


def texts(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        for message in json.loads(line)["messages"]:
            yield f"{message['role']}\n"
            yield message["content"]


def count_words(path: Path, names: list[str]) -> Counter[Word]:
    pieces = Counter(piece for text in texts(path) for piece in PIECES.findall(text))
    return Counter({tuple(names[byte] for byte in piece.encode()): count for piece, count in pieces.items()})


def merge_pair(word: Word, pair: Pair) -> Word:
    merged: list[str] = []
    position = 0
    while position < len(word):
        if word[position : position + 2] == pair:
            merged.append("".join(pair))
            position += 2
        else:
            merged.append(word[position])
            position += 1
    return tuple(merged)


def learn(words: Counter[Word], count: int) -> list[Pair]:
    merges: list[Pair] = []
    while len(merges) < count:
        pairs: Counter[Pair] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({merge_pair(word, best): times for word, times in words.items()})
    return merges


def tokenizer(names: list[str], merges: list[Pair]) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokens = [*SPECIAL_TOKENS, *names, *("".join(pair) for pair in merges)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **plain} for index, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
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
            "merges": [list(pair) for pair in merges],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    return {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": end_of_turn,
        "model_max_length": MODEL_MAX_LENGTH,
        "pad_token": end_of_text,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def files() -> dict[str, bytes]:
    names = byte_names()
    merges = learn(count_words(HERE / TRAIN_FILE, names), VOCABULARY - len(SPECIAL_TOKENS) - len(names))
    documents = {"tokenizer.json": tokenizer(names, merges), "tokenizer_config.json": tokenizer_config()}
    made = {name: (json.dumps(document, indent=1) + "\n").encode() for name, document in documents.items()}
    return {**made, "chat_template.jinja": TEMPLATE.read_bytes()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tiny recipe's tokenizer, or check the committed files.")
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / "tiny-tokenizer")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    options = parser.parse_args()
    made = files()
    problems = list(differences(made, options.folder)) if options.check else []
    for problem in problems:
        print(problem, file=sys.stderr)
    if not options.check:
        options.folder.mkdir(parents=True, exist_ok=True)
        for name, content in made.items():
            write(options.folder / name, content)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
