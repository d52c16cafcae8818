"""What takes the place of Helm charts and Jinja templates: every parameter has its row, and every row holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from stoker.cli.main import app
from stoker.cli.planned import PLANNED
from stoker.jobs.spec import load_job, schema
from stoker.launchers.kubernetes.manifests import faults, manifests
from tests.support.paths import DOCS

PAGES = ("from-helm.md", "from-jinja.md")
VALUES = {
    "tensorflow": """
        global.imagePullPolicy global.services.aws.region global.services.aws.az global.services.aws.efs.id
        storage.name storage.accessMode storage.pv.capacity storage.pvc.name storage.pvc.request
        tfCluster.deploy tfCluster.service.name tfCluster.service.internalPort tfCluster.service.externalPort
        tfCluster.service.type tfCluster.image.repo tfCluster.image.name tfCluster.image.dockerTagCpu
        tfCluster.image.dockerTagGpu tfCluster.settings.mode tfCluster.settings.dataset tfCluster.settings.isGpu
        tfCluster.settings.nbGpuPerNode tfCluster.settings.jobs.ps tfCluster.settings.jobs.worker
        tfCluster.resources.requests.cpu tfCluster.resources.requests.memory tfCluster.resources.limits.cpu
        tfCluster.resources.limits.memory
        evaluating.deploy evaluating.replicaCount evaluating.image.repo evaluating.image.name
        evaluating.image.dockerTagCpu evaluating.image.dockerTagGpu evaluating.service.name evaluating.service.command
        evaluating.settings.dataset evaluating.settings.isGpu evaluating.settings.nbGpuPerNode evaluating.resources
        evaluating.nodeSelector
        tensorboard.deploy tensorboard.replicaCount tensorboard.image.repo tensorboard.image.name
        tensorboard.image.dockerTag tensorboard.service.name tensorboard.service.dns tensorboard.service.type
        tensorboard.service.externalPort tensorboard.service.internalPort tensorboard.service.command
        tensorboard.resources
        serving.deploy serving.replicaCount serving.image serving.service serving.settings.dataset serving.resources
        tfCluster.image.dockerTag dataImport.isRequired dataImport.service.name dataImport.settings.url dataImport.image
    """,
    "efs": """
        global.services.aws.region global.services.aws.efs.id storage.name storage.accessMode storage.pv.capacity
        storage.pvc.request
    """,
    "dataloader": """
        global.imagePullPolicy global.services.aws.region global.services.aws.efs.id storage.name storage.accessMode
        storage.pv.capacity storage.pvc.request dataLoader.service.name dataLoader.service.command
        dataLoader.settings.dataset dataLoader.settings.imagenetUsername dataLoader.settings.imagenetApiKey
        dataLoader.image
    """,
    "caching": """
        sourceNginx cacheNginx.replicaCount cacheNginx.image cacheNginx.resources cacheNginx.nodeSelector
        cacheNginx.config varnish wrk.concurrency wrk.duration wrk.file wrk.target wrk.threads wrk.timeout
        wrk.replicaCount wrk.image wrk.resources wrk.nodeSelector
    """,
}
VARIABLES = """
    name image script cmdline_args worker_replicas ps_replicas num_gpus_per_worker has_eval has_tensorboard
    run_tensorboard has_coordinator port use_node_port checkpoint_pvc_name model_checkpoint_dir create_pvc_checkpoint
    create_volume_inspector deploy data_dir train_dir model_dir log_dir train_log_dir checkpoint_dir batch_size
    num_train_epoch credential_secret_key credential_secret_name gcp_credential_secret credential_secret_json
    use_in_process_cluster run_in_process_training replicas cmdline_arg_list ip_mapping workers
"""


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def rows(text: str) -> Iterator[tuple[str, str]]:
    """The rows of every table."""
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| values.yaml |", "| variable |", "| in the")):
            left, right = line.strip("|").split(" | ")
            yield left, right


def marked(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("chart", list(VALUES))
def test_every_value_of_a_chart_has_a_row(chart: str) -> None:
    sections = text_of("from-helm.md").split("\n## ")
    (section,) = [one for one in sections if one.startswith((f"Chart `{chart}`", f"Charts `{chart}"))]
    found = [key for left, _ in rows(section) for key in marked(left)]
    assert sorted(found) == sorted(VALUES[chart].split())


def test_every_variable_of_a_template_has_a_row() -> None:
    found = {key for left, _ in rows(text_of("from-jinja.md")) for key in marked(left)}
    assert set(VARIABLES.split()) <= found


def property_of(schema: dict[str, Any], defs: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The schema of a key, through references and choices."""
    for one in (schema, *schema.get("anyOf", [])):
        if "$ref" in one:
            one = defs[one["$ref"].rpartition("/")[2]]
        if name == "[]" and "items" in one:
            items: dict[str, Any] = one["items"]
            return items
        if name in one.get("properties", {}):
            known: dict[str, Any] = one["properties"][name]
            return known
        if isinstance(one.get("additionalProperties"), dict):
            others: dict[str, Any] = one["additionalProperties"]
            return others
    return None


def is_key(path: str) -> bool:
    """Whether the job file has a key."""
    whole = schema()
    here: dict[str, Any] | None = {"$ref": whole["$ref"]} if "$ref" in whole else whole
    for name in path.replace("[]", ".[]").split("."):
        here = None if here is None else property_of(here, whole["$defs"], name)
    return here is not None


def test_the_check_of_keys_knows_bad_ones() -> None:
    good = ("workers", "resources.gpu", "volumes[].claim", "roles.ps.image", "roles.NAME.resources.cpu", "env.DATASET")
    bad = ("worker", "resources.gpus", "volumes[].name", "roles.ps.imag", "roles.NAME.resources.disk", "name.x")
    assert [is_key(one) for one in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize("page", PAGES)
def test_every_key_and_command_in_the_tables_is_there(page: str) -> None:
    commands = typer.main.get_command(app)
    checked = 0
    for _, right in rows(text_of(page)):
        for word in marked(right):
            if word.startswith("stoker "):
                noun, verb = word.split()[1:3]
                known = getattr(commands, "commands", {}).get(noun)
                assert verb in getattr(known, "commands", {}) or verb in PLANNED.get(noun, ()), word
                checked += 1
            elif re.fullmatch(r"[a-z_]+(\[\])?(\.[A-Za-z_]+(\[\])?)*(: .+)?", word):
                key = word.partition(": ")[0]
                if key not in ("efs", "dataloader", "continuous", "load_balancer"):
                    assert is_key(key), word
                    checked += 1
    assert checked > 25


@pytest.mark.parametrize("page", PAGES)
def test_the_job_files_of_a_page_can_be_rendered(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        path = tmp_path / "job.yaml"
        path.write_text(block)
        job = load_job(path)
        assert job.name == yaml.safe_load(block)["name"]
        assert list(faults(job)) == []
        assert manifests(job)
