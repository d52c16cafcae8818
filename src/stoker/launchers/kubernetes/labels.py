"""Labels of a job's objects, and the builder of objects that carry them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.jobs.spec import JobSpec
from stoker.kube.objects import JOB_LABEL, MANAGED_BY, QUEUE_LABEL, Manifest, build_object


def build_labels(job: JobSpec, labels: Mapping[str, str]) -> dict[str, str]:
    """Build the labels of an object of a job."""
    return {**job.labels, **MANAGED_BY, JOB_LABEL: job.name, **labels}


def build_queue_labels(job: JobSpec) -> dict[str, str]:
    """Build the labels by which Kueue queues a workload; empty without `kubernetes.queue`."""
    labels = {
        QUEUE_LABEL: job.kubernetes.queue,
        "kueue.x-k8s.io/priority-class": job.kubernetes.queue_priority,
    }
    return {name: value for name, value in labels.items() if value}


def build_job_object(
    version: str, kind: str, name: str, job: JobSpec, labels: Mapping[str, str], **body: Any
) -> Manifest:
    """Build an object with the labels of a job, in its namespace."""
    return build_object(version, kind, name, build_labels(job, labels), namespace=job.kubernetes.namespace, **body)
