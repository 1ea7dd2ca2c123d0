"""Write the tables of docs/determinism.md from the guest's own: `python scripts/determinism_table.py`."""

from __future__ import annotations

from pathlib import Path

from kitbuild.guest import settings, surroundings

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "determinism.md"
BEGIN, END = "<!-- made by scripts/determinism_table.py -->", "<!-- end -->"
WHEN = {
    settings.ALWAYS: "always",
    settings.STRICT: "strict",
    settings.CUDA: "on a GPU",
    settings.STRICT_CUDA: "strict, on a GPU",
    settings.TRACKED: "with `track`",
    settings.PORTABLE: "with `cpu_portable`",
}


def _reason(text: str) -> str:
    return text.replace("likewise the", "as above, the").replace("likewise", "as above")


def tables() -> str:
    """The environment variables, what is not passed on, then what is refused."""
    lines = ["| variable | value | when | why |", "|---|---|---|---|"]
    for setting in settings.TABLE:
        reason = _reason(setting.reason)
        value = (
            "not set" if setting.value is None else f"`{setting.value}`".replace("`{threads}`", "threads per process")
        )
        lines.append(f"| `{setting.name}` | {value} | {WHEN[setting.when]} | [{reason}]({setting.source}) |")
    lines += [
        "",
        "Strict does not pass on what is set of these and not above:",
        "",
        "| variables | decide |",
        "|---|---|",
    ]
    lines += [f"| `{item.prefix}…` | [{_reason(item.reason)}]({item.source}) |" for item in settings.FAMILIES]
    lines += ["", "Refused in a container, with exit code 7, for unsetting them in the guest would be too late:", ""]
    lines += ["| variable | it |", "|---|---|"]
    lines += [f"| `{name}` | [{what}]({source}) |" for name, what, source in surroundings.REFUSED]
    lines += ["", "Refused under `determinism: strict`, with exit code 2:", ""]
    lines += [f"- `train.{field}`: {why}; {advice}" for field, _, why, advice in settings.REFUSED]
    return "\n".join(lines)


def rendered(text: str) -> str:
    """The document with current tables."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
