"""The job file: one frozen struct per section, decoded with every fault reported at once.

`types` defines the types of single values, `sections` and `launcher_sections` the keys of each section, `checks` the
invalid combinations of keys, `job_file` reading, writing and the JSON Schema. `docs/job-file.md` is generated from the
descriptions here.
"""

from stoker.jobs.spec.job_file import job_schema, load_job, parse_job, to_plain, to_yaml
from stoker.jobs.spec.launcher_sections import KubernetesSpec, MpiSpec, RaySpec, SlurmSpec, SshSpec
from stoker.jobs.spec.sections import (
    CacheSpec,
    CheckpointSpec,
    DataSpec,
    ElasticSpec,
    JobSpec,
    ProfileSpec,
    ProgramSpec,
    ResourcesSpec,
    RoleSpec,
    SecretFilesSpec,
    SecretKeySpec,
    VolumeSpec,
    WorkerGroupSpec,
)
from stoker.jobs.spec.types import DEFAULT_PORT, RESERVED_ENV

__all__ = [
    "DEFAULT_PORT",
    "RESERVED_ENV",
    "CacheSpec",
    "CheckpointSpec",
    "DataSpec",
    "ElasticSpec",
    "JobSpec",
    "KubernetesSpec",
    "MpiSpec",
    "ProfileSpec",
    "ProgramSpec",
    "RaySpec",
    "ResourcesSpec",
    "RoleSpec",
    "SecretFilesSpec",
    "SecretKeySpec",
    "SlurmSpec",
    "SshSpec",
    "VolumeSpec",
    "WorkerGroupSpec",
    "job_schema",
    "load_job",
    "parse_job",
    "to_plain",
    "to_yaml",
]
