"""The cache in a cluster, and what fills it, as Kubernetes objects: plain values, made by pure functions.

| wanted | objects |
|---|---|
| a cache on the nodes' own disks | ConfigMap, Service, Deployment with an emptyDir |
| a cache on a claim | ConfigMap, Service, StatefulSet with the claim, or one for each pod of a class |
| its filling | ConfigMap of the URLs, Job |

Nothing of ours need be in an image: the cache's has `sh` and `nginx`, the one that fills it `sh` and `wget` or `curl`.
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
    ACCESS,
    CACHE,
    CACHE_PORT,
    CONTAINER,
    GROUP,
    MANAGED_BY,
    PART,
    ROLE,
    Manifest,
    claim,
    fits,
    manifest,
    merged,
    safe_container,
)
from stoker.serve.nginx.config import CacheSettings, Contained, cache_config, zone_bytes
from stoker.storage import shown

OURS = {PART: "cache"}
"""What `--stop` removes, and nothing else."""
SERVER, FILLER = ({**OURS, ROLE: role} for role in ("server", "warm"))
KINDS = ("Deployment", "StatefulSet", "Job", "Service", "ConfigMap", "PersistentVolumeClaim")
"""All that we may have made, pods apart: they go with those that own them."""
IMAGE = "docker.io/library/nginx:1.28"
WARM_IMAGE = "docker.io/library/busybox:1.37"
LEAST = 32 << 20
"""Four slices."""
MOST_REPLICAS = 64
MOST_LANES = 64
USER = 101
"""nginx's own in its official images; any other would do."""
NOBODY = 65534
GRACE_S = 40
"""A little more than nginx gives to transfers that it has begun."""
MEMORY = 512 << 20
"""Beside the keys: buffers of 1 MiB for each of some hundred transfers at once, and the page cache of some files."""
WARM_TTL_S = 600
WARM_DEADLINE_S = 86400
CONFIG_MAX = (1 << 20) - (1 << 14)
"""What the API server takes as one ConfigMap, without what else is in it."""

CONFIG, RUN, STORE = "/etc/stoker", "/run/stoker", "/cache"
"""Where a pod of the cache finds its configuration, writes what is its own, and keeps what it caches."""
CHECKSUM = f"{GROUP}/config"


@dataclass(frozen=True, kw_only=True)
class ClusterCache:
    """A cache as it should be; `claim` is one that is there, `storage_class` asks for one for each pod."""

    origins: tuple[tuple[str, str], ...]
    size: int
    """Of each pod."""
    image: str = IMAGE
    replicas: int = 1
    claim: str | None = None
    storage_class: str | None = None
    fresh_s: float = 60.0
    namespace: str | None = None

    @property
    def kind(self) -> str:
        """What keeps its pods running."""
        return "Deployment" if self.claim is None and self.storage_class is None else "StatefulSet"


def cache_objects(cache: ClusterCache, patches: Sequence[Manifest] = ()) -> list[Manifest]:
    """Render every object of a cache, in an order in which they can be made."""
    if faults := list(_faults(cache)):
        raise SpecError(faults)
    config = manifest("v1", "ConfigMap", CACHE, OURS, namespace=cache.namespace, data=_files(cache))
    spec = {
        "selector": SERVER,
        "ports": [{"name": "http", "port": CACHE_PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    service = manifest("v1", "Service", CACHE, OURS, namespace=cache.namespace, spec=spec)
    return _marked(*patched([config, service, _workload(cache)], patches))


def _marked(config: Manifest, service: Manifest, workload: Manifest) -> list[Manifest]:
    """Mark the pods by all that they are made of: a change makes new ones, and these can be told from the former."""
    made_of = json.dumps([config.get("data"), workload["spec"]["template"]["spec"]], sort_keys=True)
    note = {CHECKSUM: hashlib.sha256(made_of.encode()).hexdigest()}
    return [config, service, merged(workload, {"spec": {"template": {"metadata": {"annotations": note}}}})]


def version_of(template: Manifest) -> str:
    """Tell the mark of a pod, or of the template of pods."""
    return str((template["metadata"].get("annotations") or {}).get(CHECKSUM) or "")


def _faults(cache: ClusterCache) -> Iterator[Fault]:
    if cache.size < LEAST:
        yield Fault("--size", f"is {format_bytes(cache.size)}, and must be at least {format_bytes(LEAST)}")
    if not 1 <= cache.replicas <= MOST_REPLICAS:
        yield Fault("--replicas", f"is {cache.replicas}, and must be from 1 to {MOST_REPLICAS}")
    if cache.claim is not None and cache.storage_class is not None:
        yield Fault("--claim", "is a volume that is there, and --class asks for new ones: give one of them")
    yield from _image_faults(cache.image)
    for _, url in cache.origins:
        if not url.startswith(("http://", "https://")):
            bucket = "a public bucket has an https address, like https://BUCKET.s3.amazonaws.com"
            yield Fault("--origin", f"nginx cannot fetch from {shown(url)}; {bucket}")


def _image_faults(image: str) -> Iterator[Fault]:
    if not image or not image.isprintable() or " " in image:
        yield Fault("--image", f"{image!r} is no name of an image")


def check_claim(found: Manifest, replicas: int) -> None:
    """Refuse a claim that several pods cannot write to."""
    name, modes = found["metadata"]["name"], found["spec"].get("accessModes") or []
    writable = {ACCESS["rwx"]} if replicas > 1 else {ACCESS["rwx"], ACCESS["rwo"], ACCESS["rwop"]}
    if not writable.intersection(modes):
        several = f"by {replicas} pods" if replicas > 1 else "to"
        how = ", ".join(modes) or "nothing"
        raise InputError(
            f"claim {name} allows {how}, and cannot be written {several}",
            hint="use --replicas 1, a ReadWriteMany claim, or --class, which gives each pod a claim of its own"
            if replicas > 1
            else "name a claim that can be written to",
        )


# --- What runs


def _workload(cache: ClusterCache) -> Manifest:
    template = {"metadata": {"labels": {**SERVER, **MANAGED_BY}}, "spec": _pod(cache)}
    spec: Manifest = {"replicas": cache.replicas, "selector": {"matchLabels": SERVER}, "template": template}
    if cache.kind == "StatefulSet":
        spec |= {"serviceName": CACHE, "podManagementPolicy": "Parallel"}
    if cache.storage_class is not None:
        asked = claim("cache", cache.size, "rwo", OURS, storage_class=cache.storage_class)
        spec["volumeClaimTemplates"] = [asked]
    return manifest("apps/v1", cache.kind, CACHE, OURS, namespace=cache.namespace, spec=spec)


def _pod(cache: ClusterCache) -> Manifest:
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": CACHE}},
        {"name": "run", "emptyDir": {}},
    ]
    if cache.claim is not None:
        volumes.append({"name": "cache", "persistentVolumeClaim": {"claimName": cache.claim}})
    elif cache.storage_class is None:
        volumes.append({"name": "cache", "emptyDir": {"sizeLimit": str(_disk(cache))}})
    pod = _safe_pod(USER)
    pod["securityContext"] |= {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"}
    pod |= {"terminationGracePeriodSeconds": GRACE_S, "containers": [_container(cache)], "volumes": volumes}
    if cache.replicas > 1:
        spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        pod["topologySpreadConstraints"] = [{**spread, "labelSelector": {"matchLabels": SERVER}}]
    return pod


def _safe_pod(user: int) -> Manifest:
    """Take from a pod what neither nginx nor wget needs."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _container(cache: ClusterCache) -> Manifest:
    memory = str(MEMORY + zone_bytes(_settings(cache)))
    requests = {"cpu": "250m", "memory": memory}
    if cache.kind == "Deployment":  # else the node that was chosen might not have the room
        requests["ephemeral-storage"] = str(_disk(cache))
    probe = {"httpGet": {"path": "/-/healthy", "port": "http"}, "timeoutSeconds": 5}
    return {
        "name": CONTAINER,
        "image": cache.image,
        "command": ["/bin/sh", f"{CONFIG}/start.sh"],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [{"name": "http", "containerPort": CACHE_PORT, "protocol": "TCP"}],
        "resources": {"requests": requests, "limits": {"memory": memory}},
        "readinessProbe": {**probe, "periodSeconds": 2},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", f"{CONFIG}/stop.sh"]}}},
        "securityContext": {**safe_container(), "readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG, "readOnly": True},
            {"name": "run", "mountPath": RUN},
            {"name": "cache", "mountPath": STORE},
        ],
    }


def _disk(cache: ClusterCache) -> int:
    """Give what an emptyDir may grow to: a pod that passes it is ended, and nginx looks only now and then."""
    return cache.size + cache.size // 10 + (64 << 20)


# --- Its files


def _settings(cache: ClusterCache) -> CacheSettings:
    return CacheSettings(
        origins=cache.origins,
        dir=Path(RUN, "cache"),
        size=cache.size,
        host="0.0.0.0",
        port=CACHE_PORT,
        valid_s=max(1, round(cache.fresh_s)),
        contained=Contained(told=Path(CONFIG), found=Path(RUN)),
    )


def _files(cache: ClusterCache) -> dict[str, str]:
    secure = any(url.startswith("https://") for _, url in cache.origins)
    return {
        "nginx.conf": cache_config(_settings(cache), Path(RUN)),
        "start.sh": _start(secure),
        "stop.sh": STOP,
        "origins.json": json.dumps([{"name": name, "url": shown(url)} for name, url in cache.origins]) + "\n",
        "stats.json": json.dumps({"engine": "nginx", "budget": cache.size}) + "\n",
    }


def _start(secure: bool) -> str:
    """Write what a pod runs: what it alone can find out becomes files, and then it becomes nginx."""
    return f"""\
# Written by stoker.
set -eu
say() {{ echo "stoker: $*" >&2; }}

near= servers= only=
while read -r key value _ || [ -n "$key" ]; do
    case $key:$value in
        nameserver:*%*) ;;
        nameserver:*:*) servers="$servers [$value]" ;;
        nameserver:*) servers="$servers $value" only=" ipv6=off" ;;
        search:*) near=$value ;;
    esac
    key=
done < /etc/resolv.conf
[ -n "$servers" ] || {{ say "no nameserver in /etc/resolv.conf"; exit 1; }}
# Addresses that a network of IPv4 cannot reach are not to be chosen, hence `only`.
cat > {RUN}/resolver.conf << END
resolver$servers$only;
map \\$scheme \\$stoker_near {{ default "$near"; }}
map \\$scheme \\$stoker_domain {{ default "${{near#*.svc.}}"; }}
END
if [ -s /proc/net/if_inet6 ]; then
    echo "listen [::]:{CACHE_PORT} ipv6only=on backlog=1024;"
fi > {RUN}/listen.conf
{TRUSTED if secure else ""}\
# A folder for each pod, for a claim may be shared; less what a killed nginx was just writing.
mkdir -p "{STORE}/$POD_NAME"
ln -sfn "{STORE}/$POD_NAME" {RUN}/cache
find "{STORE}/$POD_NAME" -type f -name '*.{"[0-9]" * 10}' -exec rm -f {{}} + || say "old temporary files stay"
ulimit -n "$(ulimit -H -n)" || say "the number of open files stays at $(ulimit -n)"
PATH=$PATH:/usr/sbin:/usr/local/sbin
command -v nginx > /dev/null || {{ say "this image has no nginx"; exit 1; }}
exec nginx -p {RUN} -c {CONFIG}/nginx.conf -e stderr
"""


TRUSTED = f"""\
for file in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
    [ ! -r "$file" ] || echo "proxy_ssl_trusted_certificate $file;" > {RUN}/trusted.conf
done
[ -e {RUN}/trusted.conf ] || {{ say "this image has no certificates to check https origins with"; exit 1; }}
"""
STOP = f"""\
# Written by stoker. Lets begun transfers end; the first seconds are for those who still think that we are there.
read -r pid < {RUN}/nginx.pid
sleep 3
kill -QUIT "$pid"
while kill -0 "$pid"; do sleep 1; done
"""


# --- What fills it


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Objects to be read once through each of the caches, by their paths there."""

    paths: tuple[str, ...]
    caches: tuple[str, ...]
    lanes: int = 4
    """So many at a time."""
    image: str = WARM_IMAGE
    namespace: str | None = None

    @property
    def name(self) -> str:
        """The same for the same wish, so that whoever asks again finds what runs already."""
        wish = json.dumps([self.paths, self.caches, self.lanes, self.image])
        return f"stoker-warm-{hashlib.sha256(wish.encode()).hexdigest()[:10]}"


def filling_objects(filling: Filling, patches: Sequence[Manifest] = ()) -> list[Manifest]:
    """Render the Job that fills a cache, and the ConfigMap of what it reads."""
    if faults := list(_image_faults(filling.image)):
        raise SpecError(faults)
    data = {
        "warm.sh": WARM,
        "caches": "".join(f"{_line(url)}\n" for url in filling.caches),
        "paths": "".join(f"{_line(path)}\n" for path in filling.paths),
    }
    size = sum(len(text.encode()) for text in data.values())
    if size > CONFIG_MAX:
        raise InputError(
            f"the list of {len(filling.paths):,} objects has {format_bytes(size)}, and a ConfigMap holds 1 MiB",
            hint="warm a part at a time: --shards A..B",
        )
    config = manifest("v1", "ConfigMap", filling.name, FILLER, namespace=filling.namespace, data=data)
    return patched([config, _job(filling)], patches)


def _line(text: str) -> str:
    if any(ord(letter) <= 32 or ord(letter) == 127 for letter in text):
        raise InputError("a URL has no spaces or line breaks", where=repr(text))
    return text


def _job(filling: Filling) -> Manifest:
    memory = str((64 + 16 * filling.lanes) << 20)
    container = {
        "name": CONTAINER,
        "image": filling.image,
        "command": ["/bin/sh", f"{CONFIG}/warm.sh", str(filling.lanes)],
        "resources": {"requests": {"cpu": "250m", "memory": memory}, "limits": {"memory": memory}},
        "securityContext": {**safe_container(), "readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "config", "mountPath": CONFIG, "readOnly": True}],
    }
    pod = _safe_pod(NOBODY) | {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": filling.name}}],
    }
    spec = {
        "backoffLimit": 2,
        "ttlSecondsAfterFinished": WARM_TTL_S,
        "activeDeadlineSeconds": WARM_DEADLINE_S,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                # What it could not read after some tries, another pod will not read either.
                {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [1]}},
            ]
        },
        "template": {"metadata": {"labels": {**FILLER, **MANAGED_BY}}, "spec": pod},
    }
    return manifest("batch/v1", "Job", filling.name, FILLER, namespace=filling.namespace, spec=spec)


WARM = f"""\
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

patiently() {{
    try=1
    until said=$(get "$1"); do
        [ "$try" -lt 4 ] || return 1
        sleep "$((try * try))"
        try=$((try + 1))
    done
}}

lane() {{
    number=0
    while read -r path; do
        number=$((number + 1))
        [ "$((number % $2))" -eq "$1" ] || continue
        while read -r cache <&3; do
            patiently "$cache$path" || {{
                echo "failed $number $(printf '%s' "$said" | tr '\\n' ' ')"
                return 1
            }}
        done 3< {CONFIG}/caches
        echo "read $number"
    done < {CONFIG}/paths
}}

at=0 lanes=
while [ "$at" -lt "$1" ]; do
    lane "$at" "$1" &
    lanes="$lanes $!"
    at=$((at + 1))
done
code=0
for one in $lanes; do
    wait "$one" || code=1
done
exit "$code"
"""


# --- Patches


def patched(objects: Sequence[Manifest], patches: Sequence[Manifest]) -> list[Manifest]:
    """Merge patches into the objects of their kind and, if they name one, of that name; refuse one without any."""
    found = list(objects)
    for patch in patches:
        chosen = [at for at, one in enumerate(found) if fits(patch, one)]
        if not chosen:
            kind, name = patch.get("kind"), (patch.get("metadata") or {}).get("name")
            there = ", ".join(f"{one['kind']} {one['metadata']['name']}" for one in found)
            raise InputError(f"--patch: there is no {kind} {name or ''}".rstrip(), hint=f"there are {there}")
        for at in chosen:
            found[at] = merged(found[at], patch)
    return found
