"""Kubernetes objects of the shared cache and of the Job that warms it, built by pure functions.

| purpose | objects |
|---|---|
| cache on the local disks of nodes | ConfigMap, Service, Deployment with an emptyDir |
| cache on a claim | ConfigMap, Service, StatefulSet with the claim, or with a claim per pod from a storage class |
| warming | ConfigMap with the URLs, Job |

The images need nothing of stoker's: the cache's needs `sh` and `nginx`, the warming one `sh` and `wget` or `curl`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.core.units import format_bytes
from stoker.errors import Fault, InputError, SpecError
from stoker.kube.objects import (
    ACCESS_MODES,
    CACHE_PORT,
    CACHE_SERVICE,
    MAIN_CONTAINER,
    MANAGED_BY,
    PART_LABEL,
    ROLE_LABEL,
    Manifest,
    apply_patches,
    build_claim,
    build_object,
    restricted_pod,
    restricted_security_context,
)
from stoker.kube.rollout import annotate_config
from stoker.serve.nginx.config import ContainerPaths, NginxCacheConfig, keys_zone_bytes, render_cache_config
from stoker.storage import redacted

CACHE_LABELS = {PART_LABEL: "cache"}
"""The labels of all objects that `--stop` deletes."""
SERVER_LABELS, WARM_LABELS = ({**CACHE_LABELS, ROLE_LABEL: role} for role in ("server", "warm"))
KINDS = ("Deployment", "StatefulSet", "Job", "Service", "ConfigMap", "PersistentVolumeClaim")
"""The kinds of objects of a cache; pods are deleted with their owners."""
NGINX_IMAGE = "docker.io/library/nginx:1.28"
WARM_IMAGE = "docker.io/library/busybox:1.37"
MIN_CACHE_BYTES = 32 << 20
"""Four slices."""
MAX_REPLICAS = 64
MAX_PARALLEL_READS = 64
NGINX_UID = 101
"""The nginx user of the official images; any other would work."""
NOBODY_UID = 65534
GRACE_S = 40
"""Slightly longer than nginx's worker_shutdown_timeout."""
BASE_MEMORY_BYTES = 512 << 20
"""Memory beside the cache keys: 1 MiB buffers for some hundred concurrent transfers, and page cache."""
WARM_TTL_S = 600
WARM_DEADLINE_S = 86400
MAX_CONFIG_MAP_BYTES = (1 << 20) - (1 << 14)
"""The size limit of a ConfigMap, less some space for its metadata."""

CONFIG_DIR, RUN_DIR, CACHE_DIR = "/etc/stoker", "/run/stoker", "/cache"
"""Mount paths in a cache pod: configuration, runtime files, and cached data."""


@dataclass(frozen=True, kw_only=True)
class ClusterCache:
    """The desired cache; `claim` is an existing claim, `storage_class` requests a new claim per pod."""

    origins: tuple[tuple[str, str], ...]
    size: int
    """Bytes per pod."""
    image: str = NGINX_IMAGE
    replicas: int = 1
    claim: str | None = None
    storage_class: str | None = None
    revalidate_after_s: float = 60.0
    namespace: str | None = None

    @property
    def kind(self) -> str:
        """The kind of the workload that runs the pods."""
        return "Deployment" if self.claim is None and self.storage_class is None else "StatefulSet"


def build_cache_objects(cache: ClusterCache, patches: Sequence[Manifest] = ()) -> list[Manifest]:
    """Build all objects of a cache, in the order in which to create them."""
    if faults := list(_cache_faults(cache)):
        raise SpecError(faults)
    config = build_object(
        "v1", "ConfigMap", CACHE_SERVICE, CACHE_LABELS, namespace=cache.namespace, data=_config_files(cache)
    )
    spec = {
        "selector": SERVER_LABELS,
        "ports": [{"name": "http", "port": CACHE_PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    service = build_object("v1", "Service", CACHE_SERVICE, CACHE_LABELS, namespace=cache.namespace, spec=spec)
    config, service, workload = apply_patches([config, service, _build_workload(cache)], patches)
    return [config, service, annotate_config(workload, config.get("data"))]


def _cache_faults(cache: ClusterCache) -> Iterator[Fault]:
    if cache.size < MIN_CACHE_BYTES:
        yield Fault("--size", f"must be >= {format_bytes(MIN_CACHE_BYTES)}, got {format_bytes(cache.size)}")
    if not 1 <= cache.replicas <= MAX_REPLICAS:
        yield Fault("--replicas", f"must be between 1 and {MAX_REPLICAS}, got {cache.replicas}")
    if cache.claim is not None and cache.storage_class is not None:
        yield Fault("--claim", "uses an existing claim and --storage-class creates new ones: pass only one of them")
    yield from _image_faults(cache.image)
    for _, url in cache.origins:
        if not url.startswith(("http://", "https://")):
            bucket = "use the https URL of a public bucket, such as https://BUCKET.s3.amazonaws.com"
            yield Fault("--origin", f"nginx cannot fetch from {redacted(url)}; {bucket}")


def _image_faults(image: str) -> Iterator[Fault]:
    if not image or not image.isprintable() or " " in image:
        yield Fault("--image", f"invalid image name {image!r}")


def check_claim_writable(claim: Manifest, replicas: int) -> None:
    """Raise InputError if the access modes of a claim do not let all pods write to it."""
    name, modes = claim["metadata"]["name"], claim["spec"].get("accessModes") or []
    writable = (
        {ACCESS_MODES["rwx"]} if replicas > 1 else {ACCESS_MODES["rwx"], ACCESS_MODES["rwo"], ACCESS_MODES["rwop"]}
    )
    if not writable.intersection(modes):
        hint = "pass a writable claim"
        if replicas > 1:
            hint = "use --replicas 1, a ReadWriteMany claim, or --storage-class, which creates a claim per pod"
        pods = f" by {replicas} pods" if replicas > 1 else ""
        raise InputError(
            f"claim {name} is not writable{pods}: its access modes are {', '.join(modes) or 'not set'}", hint=hint
        )


# --- Workload


def _build_workload(cache: ClusterCache) -> Manifest:
    template = {"metadata": {"labels": {**SERVER_LABELS, **MANAGED_BY}}, "spec": _build_pod(cache)}
    spec: Manifest = {"replicas": cache.replicas, "selector": {"matchLabels": SERVER_LABELS}, "template": template}
    if cache.kind == "StatefulSet":
        spec |= {"serviceName": CACHE_SERVICE, "podManagementPolicy": "Parallel"}
    if cache.storage_class is not None:
        claim = build_claim("cache", cache.size, "rwo", CACHE_LABELS, storage_class=cache.storage_class)
        spec["volumeClaimTemplates"] = [claim]
    return build_object("apps/v1", cache.kind, CACHE_SERVICE, CACHE_LABELS, namespace=cache.namespace, spec=spec)


def _build_pod(cache: ClusterCache) -> Manifest:
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": CACHE_SERVICE}},
        {"name": "run", "emptyDir": {}},
    ]
    if cache.claim is not None:
        volumes.append({"name": "cache", "persistentVolumeClaim": {"claimName": cache.claim}})
    elif cache.storage_class is None:
        volumes.append({"name": "cache", "emptyDir": {"sizeLimit": str(_disk_limit(cache))}})
    pod = restricted_pod(NGINX_UID)
    pod["securityContext"] |= {"fsGroup": NGINX_UID, "fsGroupChangePolicy": "OnRootMismatch"}
    pod |= {"terminationGracePeriodSeconds": GRACE_S, "containers": [_build_container(cache)], "volumes": volumes}
    if cache.replicas > 1:
        spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        pod["topologySpreadConstraints"] = [{**spread, "labelSelector": {"matchLabels": SERVER_LABELS}}]
    return pod


def _build_container(cache: ClusterCache) -> Manifest:
    memory = str(BASE_MEMORY_BYTES + keys_zone_bytes(_nginx_config(cache)))
    requests = {"cpu": "250m", "memory": memory}
    if cache.kind == "Deployment":  # otherwise the chosen node might not have the space
        requests["ephemeral-storage"] = str(_disk_limit(cache))
    probe = {"httpGet": {"path": "/-/healthy", "port": "http"}, "timeoutSeconds": 5}
    return {
        "name": MAIN_CONTAINER,
        "image": cache.image,
        "command": ["/bin/sh", f"{CONFIG_DIR}/start.sh"],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [{"name": "http", "containerPort": CACHE_PORT, "protocol": "TCP"}],
        "resources": {"requests": requests, "limits": {"memory": memory}},
        "readinessProbe": {**probe, "periodSeconds": 2},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", f"{CONFIG_DIR}/stop.sh"]}}},
        "securityContext": {**restricted_security_context(), "readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
            {"name": "run", "mountPath": RUN_DIR},
            {"name": "cache", "mountPath": CACHE_DIR},
        ],
    }


def _disk_limit(cache: ClusterCache) -> int:
    """Return the size limit of the emptyDir: exceeding it evicts the pod, and nginx only evicts periodically."""
    return cache.size + cache.size // 10 + (64 << 20)


# --- Configuration files


def _nginx_config(cache: ClusterCache) -> NginxCacheConfig:
    return NginxCacheConfig(
        origins=cache.origins,
        dir=Path(RUN_DIR, "cache"),
        size=cache.size,
        host="0.0.0.0",
        port=CACHE_PORT,
        revalidate_after_s=max(1, round(cache.revalidate_after_s)),
        container=ContainerPaths(admin_files=Path(CONFIG_DIR), runtime_files=Path(RUN_DIR)),
    )


def _config_files(cache: ClusterCache) -> dict[str, str]:
    has_https = any(url.startswith("https://") for _, url in cache.origins)
    return {
        "nginx.conf": render_cache_config(_nginx_config(cache), Path(RUN_DIR)),
        "start.sh": _start_script(has_https),
        "stop.sh": STOP_SCRIPT,
        "origins.json": json.dumps([{"name": name, "url": redacted(url)} for name, url in cache.origins]) + "\n",
        "stats.json": json.dumps({"engine": "nginx", "budget": cache.size}) + "\n",
    }


def _start_script(has_https: bool) -> str:
    """Return the start script of a pod: write what is only known at run time to files, then exec nginx."""
    return f"""\
# Written by stoker.
set -eu
log() {{ echo "stoker: $*" >&2; }}

search_domain= servers= ipv6=
while read -r key value _ || [ -n "$key" ]; do
    case $key:$value in
        nameserver:*%*) ;;
        nameserver:*:*) servers="$servers [$value]" ;;
        nameserver:*) servers="$servers $value" ipv6=" ipv6=off" ;;
        search:*) search_domain=$value ;;
    esac
    key=
done < /etc/resolv.conf
[ -n "$servers" ] || {{ log "no nameserver in /etc/resolv.conf"; exit 1; }}
# An IPv4 nameserver means an IPv4 network, which cannot reach IPv6 addresses: do not resolve to them.
cat > {RUN_DIR}/resolver.conf << END
resolver$servers$ipv6;
map \\$scheme \\$stoker_near {{ default "$search_domain"; }}
map \\$scheme \\$stoker_domain {{ default "${{search_domain#*.svc.}}"; }}
END
if [ -s /proc/net/if_inet6 ]; then
    echo "listen [::]:{CACHE_PORT} ipv6only=on backlog=1024;"
fi > {RUN_DIR}/listen.conf
{_TRUSTED_CERTIFICATES if has_https else ""}\
# One folder per pod, because a claim may be shared; delete the temporary files of a killed nginx.
mkdir -p "{CACHE_DIR}/$POD_NAME"
ln -sfn "{CACHE_DIR}/$POD_NAME" {RUN_DIR}/cache
find "{CACHE_DIR}/$POD_NAME" -type f -name '*.{"[0-9]" * 10}' -exec rm -f {{}} + || log "temporary files remain"
ulimit -n "$(ulimit -H -n)" || log "cannot raise the limit of open files, which is $(ulimit -n)"
PATH=$PATH:/usr/sbin:/usr/local/sbin
command -v nginx > /dev/null || {{ log "this image has no nginx"; exit 1; }}
exec nginx -p {RUN_DIR} -c {CONFIG_DIR}/nginx.conf -e stderr
"""


_TRUSTED_CERTIFICATES = f"""\
for file in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
    [ ! -r "$file" ] || echo "proxy_ssl_trusted_certificate $file;" > {RUN_DIR}/trusted.conf
done
[ -e {RUN_DIR}/trusted.conf ] || {{ log "this image has no CA certificates to verify https origins"; exit 1; }}
"""
STOP_SCRIPT = f"""\
# Written by stoker. Sleeps 3 s, so that the Service stops routing to this pod, then lets running transfers finish.
read -r pid < {RUN_DIR}/nginx.pid
sleep 3
kill -QUIT "$pid"
while kill -0 "$pid"; do sleep 1; done
"""


# --- Warming


@dataclass(frozen=True, kw_only=True)
class WarmJob:
    """A Job that reads objects, given by their paths, once through each cache."""

    paths: tuple[str, ...]
    caches: tuple[str, ...]
    parallel: int = 4
    """Number of concurrent reads."""
    image: str = WARM_IMAGE
    namespace: str | None = None

    @property
    def name(self) -> str:
        """The Job's name, a hash of its inputs, so that repeating the command finds the running Job."""
        inputs = json.dumps([self.paths, self.caches, self.parallel, self.image])
        return f"stoker-warm-{hashlib.sha256(inputs.encode()).hexdigest()[:10]}"


def build_warm_objects(warm_job: WarmJob, patches: Sequence[Manifest] = ()) -> list[Manifest]:
    """Build the Job that warms a cache, and the ConfigMap that lists what it reads."""
    if faults := list(_image_faults(warm_job.image)):
        raise SpecError(faults)
    data = {
        "warm.sh": WARM_SCRIPT,
        "caches": "".join(f"{_check_line(url)}\n" for url in warm_job.caches),
        "paths": "".join(f"{_check_line(path)}\n" for path in warm_job.paths),
    }
    size = sum(len(text.encode()) for text in data.values())
    if size > MAX_CONFIG_MAP_BYTES:
        raise InputError(
            f"the list of {len(warm_job.paths):,} objects has {format_bytes(size)}, a ConfigMap holds at most 1 MiB",
            hint="warm some shards at a time: --shards A..B",
        )
    config = build_object("v1", "ConfigMap", warm_job.name, WARM_LABELS, namespace=warm_job.namespace, data=data)
    return apply_patches([config, _build_job(warm_job)], patches)


def _check_line(text: str) -> str:
    if any(ord(letter) <= 32 or ord(letter) == 127 for letter in text):
        raise InputError("URL contains spaces or control characters", where=repr(text))
    return text


def _build_job(warm_job: WarmJob) -> Manifest:
    memory = str((64 + 16 * warm_job.parallel) << 20)
    container = {
        "name": MAIN_CONTAINER,
        "image": warm_job.image,
        "command": ["/bin/sh", f"{CONFIG_DIR}/warm.sh", str(warm_job.parallel)],
        "resources": {"requests": {"cpu": "250m", "memory": memory}, "limits": {"memory": memory}},
        "securityContext": {**restricted_security_context(), "readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "config", "mountPath": CONFIG_DIR, "readOnly": True}],
    }
    pod = restricted_pod(NOBODY_UID) | {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": warm_job.name}}],
    }
    spec = {
        "backoffLimit": 2,
        "ttlSecondsAfterFinished": WARM_TTL_S,
        "activeDeadlineSeconds": WARM_DEADLINE_S,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                # What one pod could not read after several attempts, another will not read either.
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": MAIN_CONTAINER, "operator": "In", "values": [1]},
                },
            ]
        },
        "template": {"metadata": {"labels": {**WARM_LABELS, **MANAGED_BY}}, "spec": pod},
    }
    return build_object("batch/v1", "Job", warm_job.name, WARM_LABELS, namespace=warm_job.namespace, spec=spec)


WARM_SCRIPT = f"""\
# Written by stoker. Reads every line of `paths` from every line of `caches`, $1 at a time.
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
if command -v curl > /dev/null; then
    get() {{ curl -fsS --connect-timeout 15 --speed-limit 1 --speed-time 60 -o /dev/null "$1" 2>&1; }}
elif command -v wget > /dev/null; then
    get() {{ wget -q -O /dev/null "$1" 2>&1; }}
else
    echo "failed 0 this image has neither curl nor wget"
    exit 1
fi

get_with_retries() {{
    try=1
    until output=$(get "$1"); do
        [ "$try" -lt 4 ] || return 1
        sleep "$((try * try))"
        try=$((try + 1))
    done
}}

worker() {{
    number=0
    while read -r path; do
        number=$((number + 1))
        [ "$((number % $2))" -eq "$1" ] || continue
        while read -r cache <&3; do
            get_with_retries "$cache$path" || {{
                echo "failed $number $(printf '%s' "$output" | tr '\\n' ' ')"
                return 1
            }}
        done 3< {CONFIG_DIR}/caches
        echo "read $number"
    done < {CONFIG_DIR}/paths
}}

index=0 workers=
while [ "$index" -lt "$1" ]; do
    worker "$index" "$1" &
    workers="$workers $!"
    index=$((index + 1))
done
code=0
for pid in $workers; do
    wait "$pid" || code=1
done
exit "$code"
"""
