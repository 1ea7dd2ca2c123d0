"""A locked image as a job for the system that runs it: Slurm, Kubernetes, Compose.

Pure: from a lock and an image reference to text, the same bytes each time. Nothing is started.
"""

from kitbuild.render.compose import render_compose
from kitbuild.render.job import Job
from kitbuild.render.k8s import render_job, render_trainjob
from kitbuild.render.reference import ImageReference
from kitbuild.render.slurm import render_slurm

__all__ = ["ImageReference", "Job", "render_compose", "render_job", "render_slurm", "render_trainjob"]
