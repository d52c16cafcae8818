"""Read and write job files, and describe them in JSON Schema."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from stoker.core import json_io, spec, yaml_io
from stoker.core.json_schema import json_schema
from stoker.core.type_hints import default_of, field_types, origin_of, union_members, unwrap
from stoker.core.units import Bytes, Seconds
from stoker.errors import Fault, InputError, NotFoundError, SpecError
from stoker.jobs.overrides import SetKey, apply_overrides
from stoker.jobs.spec.launcher_sections import Section
from stoker.jobs.spec.sections import JobSpec
from stoker.jobs.topology_traits import TOPOLOGIES

Check = Callable[[JobSpec], Iterable[Fault]]
"""A check of a job, which may be partial: see `spec.run_checks`."""

# --- Reading


def load_job(path: Path | str, overrides: Sequence[str] = (), check: Check | None = None) -> JobSpec:
    """Read a job file (`-`: standard input); overrides such as `resources.gpu=4` replace its keys.

    `check` yields further faults, which are reported together with those of the file.
    """
    if str(path) == "-":
        return parse_job(json_io.read_stream(sys.stdin.buffer, "standard input"), "standard input", overrides, check)
    try:
        text = json_io.read_file(Path(path))
    except OSError as error:
        error_class = NotFoundError if isinstance(error, FileNotFoundError) else InputError
        raise error_class(f"cannot read file: {(error.strerror or '').lower()}", where=path) from None
    return parse_job(text, path, overrides, check)


def parse_job(text: str | bytes, where: object, overrides: Sequence[str] = (), check: Check | None = None) -> JobSpec:
    """Parse the text of a job file; `where` names it in the error."""
    data, faults = yaml_io.parse_verbatim(text, where)
    data = {} if data is None else data
    keys: list[SetKey] = []
    if isinstance(data, dict):
        data, keys, override_faults = apply_overrides(data, overrides)
        faults += override_faults
    data = _drop_nulls(spec.resolve_verbatim(data, JobSpec), JobSpec)
    job, job_faults = spec.decode_partial(data, JobSpec)
    if job is not None and check is not None:
        known = {fault.path for fault in job_faults}
        job_faults += [fault for fault in spec.run_checks(job, check) if fault.path not in known]
    if faults or job_faults or job is None:
        lines = yaml_io.find_lines(text, where)
        faults += [_with_origin(fault, keys, lines) for fault in job_faults]
        raise SpecError(sorted(faults, key=lambda fault: (fault.line is None, fault.line)), where=where)
    return job


def _drop_nulls(data: Any, into: Any) -> Any:
    """Remove known keys without a value, such as `env:` with all of its lines commented out."""
    struct = next((member for member in (into, *get_args(into)) if _is_section(member)), None)
    if struct is not None and isinstance(data, Mapping):
        types = field_types(struct)
        return {
            key: _drop_nulls(value, unwrap(types.get(key)))
            for key, value in data.items()
            if value is not None or key not in types
        }
    if origin_of(into) is dict and isinstance(data, Mapping):
        return {key: _drop_nulls(value, unwrap(get_args(into)[1])) for key, value in data.items()}
    sequence = next((member for member in union_members(into) if origin_of(member) is tuple), None)
    if sequence is not None and isinstance(data, list):
        return [_drop_nulls(value, unwrap(get_args(unwrap(sequence))[0])) for value in data]
    return data


def _is_section(into: Any) -> bool:
    return isinstance(into, type) and issubclass(into, Section)


def _with_origin(fault: Fault, keys: Sequence[SetKey], lines: Mapping[str, int]) -> Fault:
    """Add the origin of a fault: the option that set a key inside or around it; else the line in the file."""
    for key, origin in reversed(keys):
        inside, around = fault.path.removeprefix(key), key.removeprefix(fault.path)
        is_inside = fault.path == key or (inside != fault.path and inside[0] in ".[")
        if is_inside or (fault.path and around != key and around[0] in ".["):
            return Fault(fault.path, f"{fault.what} (from {origin})")
    path = fault.path
    while path and path not in lines:  # a missing key: the line of its section
        path = yaml_io.parent_path(path)
    return fault._replace(line=lines.get(path))


# --- Writing


def to_yaml(job: JobSpec) -> str:
    """Write a job as YAML that parses back to an equal job; defaults are omitted."""
    return yaml_io.to_yaml(to_plain(job))


def to_plain(value: object) -> object:
    """Convert structs to plain data, without fields that have their default value."""
    match value:
        case msgspec.Struct():
            fields = ((field, getattr(value, field.name)) for field in msgspec.structs.fields(value))
            return {field.encode_name: to_plain(inner) for field, inner in fields if inner != default_of(field)}
        case Mapping():
            return {key: to_plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [to_plain(inner) for inner in value]
        case Bytes():
            return _to_quantity(value, {"Ti": 2**40, "Gi": 2**30, "Mi": 2**20})
        case Seconds():
            return _to_quantity(value, {"d": 86400, "h": 3600, "m": 60, "s": 1})
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


def _to_quantity(value: float, units: Mapping[str, int]) -> str | float:
    """Write a quantity exactly: in the largest unit that divides it, or as a plain number."""
    for unit, size in units.items():
        if value and value % size == 0:
            return f"{int(value) // size}{unit}"
    return int(value) if value == int(value) else float(value)


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of the job file, for editors."""
    schema = json_schema(JobSpec)
    entry_points = ("script", "module", "command")
    schema["$defs"]["ProgramSpec"]["oneOf"] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in entry_points
    ]
    schema["$defs"]["JobSpec"]["properties"]["topology"]["enum"] = list(TOPOLOGIES.names())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Stoker job file", **schema}
