"""The rendered files, whole: read by eye once, the same bytes from then on, and what their systems' schemas take."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubeflow_trainer_api.models as trainer
import kubernetes_validate
import pytest
import yaml

from tests.render.golden import CASES, FOLDER

SCRIPTS = sorted(name for name in CASES if name.endswith(".sh"))
COMPOSE = sorted(name for name in CASES if name.startswith("compose"))
KUBERNETES = sorted(name for name in CASES if name.startswith(("job", "trainjob")))


@pytest.mark.parametrize("name", sorted(CASES))
def test_same_bytes(name: str) -> None:
    """What is rendered is what was reviewed; `python -m tests.render.golden` writes it anew."""
    assert (FOLDER / name).read_text(encoding="utf-8") == CASES[name]()


def test_every_file_has_its_case() -> None:
    """No file is left over."""
    assert sorted(CASES) == sorted(path.name for path in FOLDER.iterdir())


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_finds_nothing(name: str) -> None:
    """Every script, at every severity."""
    tool = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([tool, FOLDER / name], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


@cache
def compose_schema() -> Any:
    """From compose-spec/compose-spec (Apache-2.0)."""
    return jsonschema.Draft201909Validator(json.loads((FOLDER.parent / "compose-spec.json").read_bytes()))


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_schema(name: str) -> None:
    """The Compose specification's own schema takes it."""
    compose_schema().validate(yaml.safe_load(CASES[name]()))


def test_compose_schema_refuses() -> None:
    """A key that Compose does not know is seen."""
    broken = yaml.safe_load(CASES["compose-1.yaml"]())
    broken["services"]["train"]["readonly"] = True
    with pytest.raises(jsonschema.ValidationError, match="readonly"):
        compose_schema().validate(broken)


def kubernetes_problems(value: dict[str, Any]) -> list[str]:
    """What the API would say; Kubeflow's own kinds by the models that its CRDs are made from."""
    if not value["apiVersion"].startswith("trainer.kubeflow.org/"):
        try:
            kubernetes_validate.validate(value, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            return [str(error.message)]
        return []
    model = {"TrainJob": trainer.TrainerV1alpha1TrainJob, "TrainingRuntime": trainer.TrainerV1alpha1TrainingRuntime}
    taken = model[value["kind"]].from_dict(value).to_dict()
    return [] if taken == value else [f"{value['kind']}: not all of it was taken"]


@pytest.mark.parametrize("name", KUBERNETES)
def test_kubernetes_schemas(name: str) -> None:
    """Each object is what the API server's schema, or the CRD's models, take, with nothing unknown in it."""
    values = list(yaml.safe_load_all(CASES[name]()))
    assert [kubernetes_problems(value) for value in values] == [[] for _ in values]


def test_pod_of_a_trainjob_is_a_pod() -> None:
    """What stands in the runtime's template is checked by Kubernetes' own schema too, as the Job that comes of it."""
    for name in ("trainjob-1.yaml", "trainjob-4.yaml"):
        _, runtime, _ = yaml.safe_load_all(CASES[name]())
        (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        whole = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "x"},
            "spec": replicated["template"]["spec"],
        }
        assert kubernetes_problems(whole) == []


@pytest.mark.parametrize(
    ("name", "kind", "path", "value"),
    [
        ("job-4.yaml", "Job", ("spec", "template", "spec", "restart"), "Never"),
        ("job-4.yaml", "Job", ("spec", "completions"), "4"),
        ("trainjob-4.yaml", "TrainJob", ("spec", "trainer", "nodes"), 4),
        ("trainjob-4.yaml", "TrainingRuntime", ("spec", "template", "spec", "jobs"), []),
    ],
)
def test_schemas_refuse(name: str, kind: str, path: tuple[str, ...], value: object) -> None:
    """A wrong key or type is seen, so that the tests above can fail."""
    (broken,) = (each for each in yaml.safe_load_all(CASES[name]()) if each["kind"] == kind)
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert kubernetes_problems(broken) != []


def test_kubernetes_pod_is_restricted() -> None:
    """The pod keeps to Kubernetes' `restricted` profile (pod-security-standards), with a read-only root."""
    for name in KUBERNETES:
        for pod in pods(list(yaml.safe_load_all(CASES[name]()))):
            (container,) = pod["containers"]
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["runAsUser"] == 10001
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert pod["automountServiceAccountToken"] is False
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            allowed = {"persistentVolumeClaim", "emptyDir"}
            assert {key for volume in pod["volumes"] for key in volume if key != "name"} <= allowed


def pods(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [value["spec"]["template"]["spec"] for value in values if value["kind"] == "Job"]
    for runtime in (value for value in values if value["kind"] == "TrainingRuntime"):
        jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        found += [each["template"]["spec"]["template"]["spec"] for each in jobs]
    return found
