"""Check the migration pages: every chart value and template variable has a row, and every row names existing keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from stoker.cli.main import make_app
from stoker.jobs.spec import job_schema, load_job
from stoker.launchers.kubernetes.checks import check_kubernetes_settings
from stoker.launchers.kubernetes.manifests import build_manifests
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


def read_page(page: str) -> str:
    return (DOCS / page).read_text()


def iter_rows(text: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of all tables as left and right column."""
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| values.yaml |", "| variable |", "| in the")):
            left, right = line.strip("|").split(" | ")
            yield left, right


def find_code(text: str) -> list[str]:
    """Return all words in backticks."""
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("chart", list(VALUES))
def test_every_chart_value_has_a_row(chart: str) -> None:
    sections = read_page("from-helm.md").split("\n## ")
    (section,) = [text for text in sections if text.startswith((f"Chart `{chart}`", f"Charts `{chart}"))]
    keys = [key for left, _ in iter_rows(section) for key in find_code(left)]
    assert sorted(keys) == sorted(VALUES[chart].split())


def test_every_template_variable_has_a_row() -> None:
    keys = {key for left, _ in iter_rows(read_page("from-jinja.md")) for key in find_code(left)}
    assert set(VARIABLES.split()) <= keys


def find_property(schema: dict[str, Any], defs: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the schema of a property, following references and unions, or None if there is none."""
    for option in (schema, *schema.get("anyOf", [])):
        if "$ref" in option:
            option = defs[option["$ref"].rpartition("/")[2]]
        if name == "[]" and "items" in option:
            items: dict[str, Any] = option["items"]
            return items
        if name in option.get("properties", {}):
            declared: dict[str, Any] = option["properties"][name]
            return declared
        if isinstance(option.get("additionalProperties"), dict):
            additional: dict[str, Any] = option["additionalProperties"]
            return additional
    return None


def is_key(path: str) -> bool:
    """Return whether the job file has this key."""
    root = job_schema()
    schema: dict[str, Any] | None = {"$ref": root["$ref"]} if "$ref" in root else root
    for name in path.replace("[]", ".[]").split("."):
        schema = None if schema is None else find_property(schema, root["$defs"], name)
    return schema is not None


def test_is_key_rejects_unknown_keys() -> None:
    good = ("workers", "resources.gpu", "volumes[].claim", "roles.ps.image", "roles.NAME.resources.cpu", "env.DATASET")
    bad = ("worker", "resources.gpus", "volumes[].name", "roles.ps.imag", "roles.NAME.resources.disk", "name.x")
    assert [is_key(key) for key in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize("page", PAGES)
def test_keys_and_commands_in_the_tables_exist(page: str) -> None:
    commands = typer.main.get_command(make_app())
    checked = 0
    for _, right in iter_rows(read_page(page)):
        for word in find_code(right):
            if word.startswith("stoker "):
                noun, verb = word.split()[1:3]
                group = getattr(commands, "commands", {}).get(noun)
                assert verb in getattr(group, "commands", {}), word
                checked += 1
            elif re.fullmatch(r"[a-z_]+(\[\])?(\.[A-Za-z_]+(\[\])?)*(: .+)?", word):
                key = word.partition(": ")[0]
                if key not in ("efs", "dataloader", "continuous", "load_balancer"):
                    assert is_key(key), word
                    checked += 1
    assert checked > 25


@pytest.mark.parametrize("page", PAGES)
def test_job_files_of_a_page_render(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", read_page(page), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        path = tmp_path / "job.yaml"
        path.write_text(block)
        job = load_job(path)
        assert job.name == yaml.safe_load(block)["name"]
        assert list(check_kubernetes_settings(job)) == []
        assert build_manifests(job)
