"""Step 5, parsing: bytes of an archive's documents into models, with located problems.

What cannot be parsed at all raises; what can be read but is wrong is returned as problems.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from kitbuild.archive.models import MANIFEST_FORMAT, Exit, Manifest, Metrics
from kitbuild.errors import LockError, Problem, VerificationError
from kitbuild.lock.models import LOCK_VERSION, Lock

LINE_LIMIT_BYTES = 1 << 20


def parse_json(data: bytes) -> Any:
    """JSON in UTF-8 in which no key is given twice; `ValueError` otherwise."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_manifest(data: bytes, *, file: str) -> Manifest:
    """A manifest; a newer format or lock is exit 3, anything malformed exit 7."""
    body = _table(data, file=file)
    lock = body.get("lock")
    writer = (
        lock["kitbuild"].get("version") if isinstance(lock, dict) and isinstance(lock.get("kitbuild"), dict) else None
    )
    _gate(body.get("format"), newest=MANIFEST_FORMAT, file=file, what="format", writer=writer)
    if isinstance(lock, dict):
        _gate(lock.get("version"), newest=LOCK_VERSION, file=file, what="lock version", writer=writer)
        body["lock"] = {key: value for key, value in lock.items() if key != "content_sha256"}
    try:
        return Manifest.model_validate(body)
    except ValidationError as error:
        raise _malformed(error, file=file) from error


def parse_lock(data: bytes, *, file: str) -> Lock:
    """A lock copied into an archive."""
    body = _table(data, file=file)
    maker = body.get("kitbuild")
    writer = maker.get("version") if isinstance(maker, dict) else None
    _gate(body.get("version"), newest=LOCK_VERSION, file=file, what="lock version", writer=writer)
    body.pop("content_sha256", None)
    try:
        return Lock.model_validate(body)
    except ValidationError as error:
        raise _malformed(error, file=file) from error


def parse_exit(data: bytes, *, file: str) -> Exit:
    """How the guest ended."""
    try:
        return Exit.model_validate(_table(data, file=file))
    except ValidationError as error:
        raise _malformed(error, file=file) from error


def parse_metrics(data: bytes, *, file: str) -> tuple[tuple[Metrics, ...], tuple[Problem, ...], bool]:
    """Steps, problems, and whether the last line was cut off while it was written."""
    lines = data.split(b"\n")
    tail = lines.pop()
    steps: list[Metrics] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        try:
            steps.append(_metrics_line(line))
        except ValueError as error:
            problems.append(Problem(message=_first(error), file=file, line=number))
    if tail:
        try:
            steps.append(_metrics_line(tail))
        except ValueError:
            return tuple(steps), tuple(problems), True
    return tuple(steps), tuple(problems), False


def _metrics_line(line: bytes) -> Metrics:
    if len(line) > LINE_LIMIT_BYTES:
        raise ValueError(f"longer than {LINE_LIMIT_BYTES} bytes")
    try:
        body = parse_json(line)
    except ValueError as error:
        raise ValueError(f"not a JSON object: {error}") from error
    return Metrics.model_validate(body)


def _table(data: bytes, *, file: str) -> dict[str, Any]:
    try:
        body = parse_json(data)
    except ValueError as error:
        raise VerificationError(f"{file} is not JSON: {error}", hint="the archive is damaged") from error
    if not isinstance(body, dict):
        raise VerificationError(f"{file} is not a JSON object", hint="the archive is damaged")
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is given twice")
    return table


def _gate(found: object, *, newest: int, file: str, what: str, writer: object) -> None:
    if isinstance(found, int) and found > newest:
        hint = f"use kitbuild {writer}, which wrote it" if writer else "use a newer kitbuild"
        raise LockError(f"{file}: {what} {found} is newer than this kitbuild reads ({newest})", hint=hint)


def _malformed(error: ValidationError, *, file: str) -> VerificationError:
    problems = [
        Problem(message=item["msg"].removeprefix("Value error, "), file=file, key=".".join(str(p) for p in item["loc"]))
        for item in error.errors()
    ]
    return VerificationError(f"{problems[0]}", problems=problems, hint="the archive is damaged")


def _first(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    item = error.errors()[0]
    place = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
