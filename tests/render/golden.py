"""The rendered files under tests/data/render, each from one job. `python -m tests.render.golden` writes them anew."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from kitbuild.render import ImageReference, Job, render_compose, render_job, render_slurm, render_trainjob

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).resolve().parents[1] / "data" / "render"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
IMAGE = ImageReference.parse(f"registry.example:5000/team/chat@{DIGEST}")
LOCAL = ImageReference.local(DIGEST, config_digest=DIGEST, manifest_digest=f"sha256:{'fedcba9876543210' * 4}")
INPUTS = ("/inputs/model", "/inputs/chat_template.jinja", "/inputs/data/0")


def job(**changes: Any) -> Job:
    given: dict[str, Any] = {
        "name": "qwen3-8b-sft",
        "recipe": "recipes/qwen3-8b.yaml",
        "lock_sha256": "fedcba9876543210" * 4,
        "nodes": 1,
        "processes": 2,
        "threads": 1,
        "cuda": True,
        "inputs": tuple(PurePosixPath(place) for place in INPUTS),
    }
    return Job(**(given | changes))


def slurm(**changes: Any) -> str:
    names = ("container", "image", "inputs", "out")
    given: dict[str, Any] = {"container": "pyxis", "image": IMAGE, "inputs": "/shared/inputs", "out": "runs"}
    given |= {name: value for name, value in changes.items() if name in names}
    return render_slurm(job(**{name: value for name, value in changes.items() if name not in names}), **given)


CASES: dict[str, Callable[[], str]] = {
    "pyxis-1.sh": slurm,
    "pyxis-4.sh": lambda: slurm(nodes=4, processes=8),
    "apptainer-1.sh": lambda: slurm(container="apptainer"),
    "apptainer-4.sh": lambda: slurm(container="apptainer", nodes=4, image="/shared/chat.sif"),
    "none-1.sh": lambda: slurm(container="none", image=None, cuda=False, processes=1, threads=2),
    "none-2.sh": lambda: slurm(container="none", image=None, nodes=2),
    "compose-1.yaml": lambda: render_compose(job(), image=IMAGE, inputs="inputs", out="/data/out"),
    "compose-2.yaml": lambda: render_compose(job(nodes=2), image=LOCAL, inputs="inputs", out="out"),
    "job-1.yaml": lambda: render_job(job(cuda=False, inputs=()), image=IMAGE, inputs=None, out=None),
    "job-4.yaml": lambda: render_job(job(nodes=4, processes=8), image=IMAGE, inputs="models", out="runs"),
    "trainjob-1.yaml": lambda: render_trainjob(job(), image=IMAGE, inputs=None, out=None),
    "trainjob-4.yaml": lambda: render_trainjob(job(nodes=4, processes=8), image=IMAGE, inputs=None, out=None),
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case, render in CASES.items():
        (FOLDER / case).write_text(render(), encoding="utf-8")
