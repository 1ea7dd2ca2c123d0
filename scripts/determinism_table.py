"""Write the tables of docs/determinism.md from the guest's own: `python scripts/determinism_table.py`."""

from __future__ import annotations

from pathlib import Path

from kitbuild.guest import determinism

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "determinism.md"
BEGIN, END = "<!-- made by scripts/determinism_table.py -->", "<!-- end -->"
WHEN = {
    determinism.ALWAYS: "always",
    determinism.STRICT: "strict",
    determinism.CUDA: "on a GPU",
    determinism.STRICT_CUDA: "strict, on a GPU",
    determinism.TRACKED: "with `track`",
}


def tables() -> str:
    """The environment variables, then what strict refuses."""
    lines = ["| variable | value | when | why |", "|---|---|---|---|"]
    for setting in determinism.TABLE:
        reason = setting.reason.replace("likewise the", "as above, the").replace("likewise", "as above")
        value = (
            "not set" if setting.value is None else f"`{setting.value}`".replace("`{threads}`", "threads per process")
        )
        lines.append(f"| `{setting.name}` | {value} | {WHEN[setting.when]} | [{reason}]({setting.source}) |")
    lines += ["", "Refused under `determinism: strict`, with exit code 2:", ""]
    lines += [f"- `train.{field}`: {why}; {advice}" for field, _, why, advice in determinism.REFUSED]
    return "\n".join(lines)


def rendered(text: str) -> str:
    """The document with current tables."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
