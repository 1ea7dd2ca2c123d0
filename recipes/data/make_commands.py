#!/usr/bin/env python3
"""Writes the chat set of the small recipes: a plain sentence in, a smart-home command out.

Stands before the flow: the recipes name its two files, `commands-train.jsonl` and `commands-heldout.jsonl`.
`--check` writes nothing and says whether the committed files are those that this script makes.
Only `Random.random` is used, whose sequence Python keeps from version to version:
https://docs.python.org/3/library/random.html#notes-on-reproducibility
"""
# ruff: noqa: D103 - each function is named after what it makes

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

Choice = TypeVar("Choice")

SEED = 20250207
TRAIN_ROWS = 640
HELDOUT_ROWS = 96
HELDOUT_SHARE = 0.2
TRAIN_FILE = "commands-train.jsonl"
HELDOUT_FILE = "commands-heldout.jsonl"

ROOMS = (
    "kitchen", "bedroom", "bathroom", "office", "hallway", "garage",
    "attic", "basement", "nursery", "library", "studio", "porch",
)  # fmt: skip
LEVELS = tuple(range(10, 100, 10))
DEGREES = tuple(range(16, 25))
GENRES = ("jazz", "rock", "blues", "folk", "soul", "pop", "techno", "opera")
TIMER_MINUTES = tuple(range(2, 61))
ALARM_HOURS = tuple(range(5, 12))
ALARM_MINUTES = tuple(range(0, 60, 5))

OPENINGS = ("", "", "", "Please ", "Can you ", "Could you ", "Hey, ", "Now ")
CLOSINGS = {"Can you ": "?", "Could you ": "?"}


class Command(NamedTuple):
    """One command, with the sentences that ask for it; the last one is kept for the held-out split."""

    text: str
    phrasings: tuple[str, ...]


def lights() -> Iterator[Command]:
    for room in ROOMS:
        for state in ("on", "off"):
            yield Command(
                f"light {room} {state}",
                (
                    f"turn {state} the {room} light",
                    f"turn the {room} lights {state}",
                    f"switch {state} the light in the {room}",
                    f"switch the light in the {room} {state}",
                ),
            )
        for level in LEVELS:
            yield Command(
                f"light {room} {level}%",
                (
                    f"dim the {room} light to {level}%",
                    f"set the {room} lights to {level} percent",
                    f"set the light in the {room} to {level}%",
                    f"put the {room} lamp at {level} percent",
                ),
            )


def heating() -> Iterator[Command]:
    for room in ROOMS:
        for degrees in DEGREES:
            yield Command(
                f"heat {room} {degrees}C",
                (
                    f"heat the {room} to {degrees} degrees",
                    f"set the {room} heating to {degrees}",
                    f"make the {room} {degrees} degrees warm",
                    f"bring the {room} to {degrees} degrees",
                ),
            )


def blinds() -> Iterator[Command]:
    verbs = {"open": ("open", "raise", "pull up"), "close": ("close", "lower", "pull down")}
    for room in ROOMS:
        for state, words in verbs.items():
            yield Command(
                f"blinds {room} {state}",
                (
                    *(f"{word} the {room} blinds" for word in words),
                    *(f"{word} the blinds in the {room}" for word in words),
                ),
            )


def music() -> Iterator[Command]:
    for room in ROOMS:
        for genre in GENRES:
            yield Command(
                f"music {room} {genre}",
                (
                    f"play {genre} in the {room}",
                    f"play some {genre} music in the {room}",
                    f"put on {genre} in the {room}",
                    f"start some {genre} in the {room}",
                ),
            )
        yield Command(
            f"music {room} stop",
            (
                f"stop the music in the {room}",
                f"stop the {room} music",
                f"be quiet in the {room}",
                f"end the music in the {room}",
            ),
        )


def clocks() -> Iterator[Command]:
    for minutes in TIMER_MINUTES:
        yield Command(
            f"timer {minutes}m",
            (
                f"set a timer for {minutes} minutes",
                f"start a {minutes} minute timer",
                f"count down {minutes} minutes",
                f"tell me when {minutes} minutes are over",
            ),
        )
    for hour in ALARM_HOURS:
        for minute in ALARM_MINUTES:
            clock = f"{hour}:{minute:02d}"
            yield Command(
                f"alarm {clock}",
                (
                    f"wake me at {clock}",
                    f"set an alarm for {clock}",
                    f"get me up at {clock}",
                    f"ring the alarm at {clock}",
                ),
            )


def pick(rng: Random, choices: Sequence[Choice]) -> Choice:
    return choices[int(rng.random() * len(choices))]


def split(rng: Random, commands: Sequence[Command]) -> tuple[list[Command], list[Command]]:
    """A command belongs to one side only, and training never sees the last way to ask for it."""
    train: list[Command] = []
    heldout: list[Command] = []
    for command in commands:
        if rng.random() < HELDOUT_SHARE:
            heldout.append(command)
        else:
            train.append(command._replace(phrasings=command.phrasings[:-1]))
    return train, heldout


def sentence(rng: Random, command: Command) -> str:
    opening = pick(rng, OPENINGS)
    text = opening + pick(rng, command.phrasings)
    return text[0].upper() + text[1:] + CLOSINGS.get(opening, ".")


def rows(rng: Random, families: Sequence[Sequence[Command]], count: int) -> list[str]:
    """`count` different lines, the families in turn so that each is equally common."""
    lines: dict[str, None] = {}
    turn = 0
    while len(lines) < count:
        command = pick(rng, families[turn % len(families)])
        turn += 1
        messages = [
            {"role": "user", "content": sentence(rng, command)},
            {"role": "assistant", "content": command.text},
        ]
        lines[json.dumps({"messages": messages}, ensure_ascii=True, separators=(",", ":"))] = None
    return list(lines)


def files() -> dict[str, bytes]:
    rng = Random(SEED)  # noqa: S311 - the point is that everyone draws the same
    train: list[list[Command]] = []
    heldout: list[list[Command]] = []
    for family in (lights, heating, blinds, music, clocks):
        kept, held = split(rng, list(family()))
        train.append(kept)
        heldout.append(held)
    made = {
        TRAIN_FILE: rows(rng, train, TRAIN_ROWS),
        HELDOUT_FILE: rows(rng, heldout, HELDOUT_ROWS),
    }
    return {name: ("\n".join(lines) + "\n").encode() for name, lines in made.items()}


def overlaps(made: dict[str, bytes]) -> Iterator[str]:
    """Sentences or commands that stand on both sides of the split, or twice on one."""
    seen: dict[str, dict[str, list[str]]] = {"user": {}, "assistant": {}}
    for name, content in made.items():
        lines = content.decode().splitlines()
        if len(set(lines)) != len(lines):
            yield f"{name}: a line stands there twice"
        for line in lines:
            for message in json.loads(line)["messages"]:
                seen[message["role"]].setdefault(message["content"], []).append(name)
    for role, contents in seen.items():
        for text, names in contents.items():
            if len(set(names)) > 1:
                yield f"{role} text in both files: {text}"


def differences(made: dict[str, bytes], folder: Path) -> Iterator[str]:
    for name, content in made.items():
        path = folder / name
        if not path.is_file():
            yield f"{name}: missing"
        elif path.read_bytes() != content:
            yield f"{name}: not what this script makes"


def write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the smart-home chat set, or check the committed files.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    options = parser.parse_args()
    made = files()
    problems = [*overlaps(made), *(differences(made, options.folder) if options.check else ())]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems and not options.check:
        for name, content in made.items():
            write(options.folder / name, content)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
