"""Kubernetes: an indexed Job with a headless Service, or a TrainJob of Kubeflow Trainer with a runtime of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitbuild.guest_files import GUEST_UID
from kitbuild.render.job import GRACE_SECONDS, RENDEZVOUS_PORT, Job, hardened
from kitbuild.render.yaml import Noted, documents

if TYPE_CHECKING:
    from kitbuild.render.reference import ImageReference

KINDS = ("trainjob", "job")
RESTARTS = 3
_INDEX = "batch.kubernetes.io/job-completion-index"
# What another try cannot mend: the recipe, the lock, a byte that is not the locked one.
_HOPELESS = [2, 3, 7]
_STOPPED = 10


def render_job(job: Job, *, image: ImageReference, inputs: str | None, out: str | None) -> str:
    """Job, Service, NetworkPolicy."""
    labels = {"app.kubernetes.io/name": job.label, "app.kubernetes.io/managed-by": "kitbuild"}
    pod = _pod_spec(job, image, inputs, out, master=f"{job.label}-0.{job.label}", container="train")
    if job.nodes > 1:
        pod["subdomain"] = job.label
    found = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.label, "labels": labels},
        "spec": {
            **_job_spec(
                job,
                container="train",
                tries=Noted(RESTARTS * job.nodes, "Failed pods; when one node is lost, the others fail with it."),
            ),
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.label, "labels": labels},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": Noted(value=True, note="Nodes look each other up before any of them is ready."),
            "selector": labels,
        },
    }
    meeting = (service,) if job.nodes > 1 else ()
    return documents(_network_policy(job, labels), *meeting, found, head=_head(job, "job", inputs, out))


def render_trainjob(job: Job, *, image: ImageReference, inputs: str | None, out: str | None) -> str:
    """TrainingRuntime, TrainJob, NetworkPolicy."""
    labels = {"app.kubernetes.io/name": job.label, "app.kubernetes.io/managed-by": "kitbuild"}
    # JobSet calls a pod's host <job set>-<replicated job>-<job index>-<pod index>, under the job set's own subdomain.
    pod = _pod_spec(job, image, inputs, out, master=f"{job.label}-node-0-0.{job.label}", container="node")
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.label, "labels": {**labels, "trainer.kubeflow.org/framework": "kitbuild"}},
        "spec": {
            "mlPolicy": Noted(
                {"numNodes": job.nodes}, "No `torch` policy: kit starts its processes itself, from what the lock says."
            ),
            "template": {
                "spec": {
                    "failurePolicy": Noted(
                        {
                            "maxRestarts": RESTARTS,
                            "rules": [
                                {
                                    "name": "hopeless",
                                    "action": "FailJobSet",
                                    "onJobFailureReasons": ["PodFailurePolicy"],
                                }
                            ],
                        },
                        "Where one node fails, all start again and go on where the last checkpoint is.",
                    ),
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                "spec": {
                                    **_job_spec(
                                        job, container="node", tries=Noted(0, "It is the whole set that starts again.")
                                    ),
                                    "template": {"metadata": {"labels": labels}, "spec": pod},
                                },
                            },
                        }
                    ],
                }
            },
        },
    }
    train = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.label, "labels": labels},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.label},
            "trainer": {"image": str(image), "numNodes": job.nodes},
        },
    }
    return documents(_network_policy(job, labels), runtime, train, head=_head(job, "trainjob", inputs, out))


def _head(job: Job, kind: str, inputs: str | None, out: str | None) -> str:
    what = "Kubeflow Trainer 2" if kind == "trainjob" else "Kubernetes 1.31 or later"
    lines = [job.title, f"For {what}; made by `kitbuild render k8s --kind {kind}`. kubectl apply -f FILE", ""]
    lines += [f"Claims that must be there (kubectl get pvc): {_out_claim(job, out)}, which holds /out" + _shared(job)]
    if job.inputs:
        lines += [
            f"and {_inputs_claim(job, inputs)}, with what `kitbuild fetch RECIPE --inputs DIR` lays out: model and data.",
            "Or bake them in (image.bake in the recipe), and this claim is not needed.",
        ]
    lines += [
        "",
        "To stop: kubectl delete the job. Each pod gets SIGTERM, saves a checkpoint and exits with code 10.",
        "Applied again, or after a preemption, it goes on where that is; for a run anew, take another claim or subPath.",
    ]
    return "\n".join(lines)


def _shared(job: Job) -> str:
    return " (ReadWriteMany)" if job.nodes > 1 else ""


def _out_claim(job: Job, out: str | None) -> str:
    return out or f"{job.label}-out"


def _inputs_claim(job: Job, inputs: str | None) -> str:
    return inputs or f"{job.label}-inputs"


def _job_spec(job: Job, *, container: str, tries: Noted) -> dict[str, Any]:
    rule = {"containerName": container, "operator": "In"}
    return {
        "completionMode": Noted("Indexed", "Each node has a number and a name of its own."),
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": tries,
        "podFailurePolicy": {
            "rules": [
                Noted(
                    {"action": "FailJob", "onExitCodes": {**rule, "values": _HOPELESS}},
                    "The recipe, the lock, or a byte that is not the locked one: another try cannot mend it.",
                ),
                Noted(
                    {"action": "Ignore", "onExitCodes": {**rule, "values": [_STOPPED]}},
                    "Stopped with a checkpoint: start again, and go on.",
                ),
                Noted(
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    "Preempted or evicted: no failure of its own.",
                ),
            ]
        },
    }


def _pod_spec(
    job: Job, image: ImageReference, inputs: str | None, out: str | None, *, master: str, container: str
) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "out", "persistentVolumeClaim": {"claimName": _out_claim(job, out)}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(job.shared_memory_bytes)}},
    ]
    if job.inputs:
        claim = {"claimName": _inputs_claim(job, inputs), "readOnly": True}
        volumes.append({"name": "inputs", "persistentVolumeClaim": claim})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": Noted(
            GRACE_SECONDS, "From SIGTERM to SIGKILL: a step and a checkpoint must fit in."
        ),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": GUEST_UID,
            "runAsGroup": GUEST_UID,
            "fsGroup": GUEST_UID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job, image, master, container)],
        "volumes": volumes,
    }


def _container(job: Job, image: ImageReference, master: str, name: str) -> dict[str, Any]:
    told = job.environment("kubernetes", image=image, hardening=hardened("policy"))
    environment: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in told.items()]
    if job.nodes > 1:
        index = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}
        environment += [
            {"name": "MASTER_ADDR", "value": master},
            {"name": "MASTER_PORT", "value": str(RENDEZVOUS_PORT)},
            {"name": "NODE_RANK", "valueFrom": index},
        ]
    resources: dict[str, Any] = {"requests": {"cpu": str(job.cores)}}
    if job.cuda:
        resources["limits"] = {"nvidia.com/gpu": str(job.processes)}
    mounts: list[dict[str, Any]] = [
        *_out_mounts(job),
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - in the container
        {"name": "cache", "mountPath": "/cache"},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - in the container
    ]
    mounts += [
        {
            "name": "inputs",
            "mountPath": str(place),
            "subPath": place.relative_to("/inputs").as_posix(),
            "readOnly": True,
        }
        for place in job.inputs
    ]
    found: dict[str, Any] = {
        "name": name,
        "image": Noted(str(image), "By digest."),
        "args": ["train"],
        "env": Noted(environment, "KIT_RESUME: a pod that is started again goes on from the last checkpoint."),
        "resources": Noted(resources, "Add the memory that the node has for this job, as request and limit."),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    if job.nodes > 1:
        found["ports"] = [{"name": "rendezvous", "containerPort": RENDEZVOUS_PORT, "protocol": "TCP"}]
    return found


def _out_mounts(job: Job) -> list[dict[str, Any]]:
    """A folder for each lock; with several nodes, one for each of them in it, and one of checkpoints for all."""
    folder = f"{job.label}-{job.lock_sha256[:12]}"
    if job.nodes == 1:
        return [{"name": "out", "mountPath": "/out", "subPath": folder}]
    return [
        {"name": "out", "mountPath": "/out", "subPathExpr": f"{folder}/node-$(NODE_RANK)"},
        {"name": "out", "mountPath": "/out/checkpoints", "subPath": f"{folder}/checkpoints"},
    ]


def _network_policy(job: Job, labels: dict[str, str]) -> dict[str, Any]:
    """A pod has no `network none`; this is the nearest."""
    selector = {"podSelector": {"matchLabels": labels}}
    spec: dict[str, Any] = {**selector, "policyTypes": ["Ingress", "Egress"]}
    note = "No network at all: nothing is fetched while training."
    if job.nodes > 1:
        note = "The job's own pods and the cluster's name service, nothing else: nothing is fetched while training."
        names = {
            "to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
            "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
        }
        spec |= {"ingress": [{"from": [selector]}], "egress": [{"to": [selector]}, names]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": job.label, "labels": labels},
        "spec": Noted(spec, note),
    }
