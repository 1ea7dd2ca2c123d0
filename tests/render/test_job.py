"""What a scheduler must know of a job."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitbuild.lock.models import Lock
from kitbuild.render import Job
from tests.archive.factory import lock_body
from tests.render.golden import job


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny-cpu", "tiny-cpu"),
        ("qwen3-0.6b_sft", "qwen3-0-6b-sft"),
        ("7b", "kit-7b"),
        ("_", "kit"),
        ("a" * 40, "a" * 40),
        ("a" * 41, "a" * 33 + "-c0f8bd"),
    ],
)
def test_label(name: str, expected: str) -> None:
    """A name as a host may be called; a long one is cut and keeps a part of its digest."""
    assert job(name=name).label == expected


@given(st.text(max_size=80))
def test_label_of_any_name(name: str) -> None:
    """RFC 1035, and room for what Kubernetes adds."""
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", job(name=name).label)


@given(st.text(max_size=80))
def test_title_is_one_line(name: str) -> None:
    """Whatever a name holds, the comment that it stands in does not end."""
    assert len(job(name=name).title.splitlines()) == 1


def test_facts_of_a_lock() -> None:
    """Processes, threads and inputs are the lock's; what is baked is not mounted."""
    body = lock_body()
    launch = {"nodes": 2, "processes_per_node": 3, "threads_per_process": 4, "strategy": "ddp"}
    image = {**body["recipe"].get("image", {}), "bake": ["model"]}
    lock = Lock.model_validate({**body, "recipe": {**body["recipe"], "launch": launch, "image": image}})
    found = Job.of(lock, recipe="a.yaml")
    assert (found.nodes, found.processes, found.threads, found.cuda) == (2, 3, 4, False)
    assert (found.cores, found.shared_memory_bytes) == (12, 3 << 30)
    assert [str(place) for place in found.inputs] == ["/inputs/data/0"]
    assert found.lock_sha256 == lock.sha256


def test_gpu_process_has_cores_for_its_data() -> None:
    """Four cores a GPU, or as many as it has threads."""
    assert (job(processes=8, threads=1).cores, job(processes=2, threads=6).cores) == (32, 12)
