"""What the figures were measured on, and how they are kept."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """The facts that a reader needs: processor, cores, memory, load when the script began."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def summary(seconds: list[float]) -> dict[str, Any]:
    """Median and all values, in seconds."""
    return {"median": round(statistics.median(seconds), 3), "all": [round(value, 3) for value in seconds]}


def keep(result: dict[str, Any], output: Path | None) -> None:
    """Print the result, and write it where that is asked for."""
    text = json.dumps(result, indent=1)
    print(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
