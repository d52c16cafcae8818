"""Which task of a TensorFlow cluster a process is, from the variables of every known template."""

from __future__ import annotations

import json

import pytest

from stoker.errors import InputError
from stoker.tf_environment import TaskEnvironment, read_tf_environment

CLUSTER = {"ps": ["ps-0.ns:8080"], "worker": ["worker-0.ns:8080", "worker-1.ns:8080"]}
TUPLES = {role: tuple(addresses) for role, addresses in CLUSTER.items()}
OLD_CHART = '{"ps":["ps-0.ns:8080",],"worker":["worker-0.ns:8080", "worker-1.ns:8080",\n],}'


@pytest.mark.parametrize("index", [1, "1"])
def test_tf_config(index: object) -> None:
    """Older templates write the index as a string."""
    config = json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": index}})
    environ = {"TF_CONFIG": config, "CLUSTER_CONFIG": "broken", "POD_NAME": "ps-0"}
    task = read_tf_environment(environ)
    assert task == TaskEnvironment(TUPLES, "worker", 1)
    assert task.address == "worker-1.ns:8080"
    assert task.trainers == (("worker", 0), ("worker", 1))
    assert json.loads(task.to_tf_config()) == {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}


@pytest.mark.parametrize(
    ("pod", "role", "index"),
    [
        ("worker-1", "worker", 1),
        ("worker-1-x7k2p", "worker", 1),
        ("ps-0-5d9f8b6c4-x7k2p", "ps", 0),
        ("small-worker-1-0-abcde", "worker", 1),
        ("evaluator-0", "evaluator", 0),
    ],
)
@pytest.mark.parametrize("config", [OLD_CHART, json.dumps(CLUSTER)], ids=["trailing commas", "json"])
def test_cluster_config_and_pod_name(config: str, pod: str, role: str, index: int) -> None:
    task = read_tf_environment({"CLUSTER_CONFIG": config, "POD_NAME": pod, "TF_CONFIG": " "})
    assert task == TaskEnvironment(TUPLES, role, index)
    assert task.address == ("" if role == "evaluator" else CLUSTER[role][index])


def test_chief_is_the_first_trainer() -> None:
    task = TaskEnvironment({"worker": ("a:1", "b:1"), "chief": ("c:1",), "ps": ("d:1",)}, "worker", 0)
    assert task.trainers == (("chief", 0), ("worker", 0), ("worker", 1))


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}])
def test_no_cluster(environ: dict[str, str]) -> None:
    assert read_tf_environment(environ) is None


@pytest.mark.parametrize(
    ("environ", "where"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG"),
        ({"TF_CONFIG": "[1]"}, "TF_CONFIG"),
        ({"TF_CONFIG": json.dumps({"cluster": CLUSTER})}, "TF_CONFIG"),
        ({"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": "x"}})}, "TF_CONFIG"),
        ({"TF_CONFIG": json.dumps({"cluster": {"worker": "a:1"}, "task": {"type": "a", "index": 0}})}, "TF_CONFIG"),
        ({"CLUSTER_CONFIG": OLD_CHART}, "POD_NAME"),
        ({"CLUSTER_CONFIG": OLD_CHART, "POD_NAME": "web-0"}, "POD_NAME"),
        ({"CLUSTER_CONFIG": "{'ps'", "POD_NAME": "ps-0"}, "CLUSTER_CONFIG"),
    ],
)
def test_invalid_variables_are_named(environ: dict[str, str], where: str) -> None:
    with pytest.raises(InputError) as caught:
        read_tf_environment(environ)
    assert caught.value.where == where
