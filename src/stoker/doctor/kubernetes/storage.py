"""Storage classes and claims: whether each claim has a volume or can get one, and whether all who mount it can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.core.units import counted, format_bytes
from stoker.doctor.checks import Check
from stoker.doctor.kubernetes.capacity import Group
from stoker.doctor.kubernetes.findings import Look, Wants, missing, some, unknown
from stoker.errors import StokerError
from stoker.kube.claims import (
    CLAIM,
    ONE_NODE,
    SHARED,
    class_named,
    default_class,
    is_warning,
    mounters,
    short_access,
    waits_for_pod,
)
from stoker.kube.conditions import is_ending, newest, own, phase_of
from stoker.kube.objects import ACCESS, Manifest
from stoker.kube.quantity import quantity

BY_HAND = "kubernetes.io/no-provisioner"
"""In the place of a provisioner: nobody makes volumes of this class."""


def of_storage(look: Look) -> Iterator[Check]:
    """Tell of the storage classes, and whether a claim that is made will get its volume."""
    if isinstance(look.classes, StokerError):
        yield unknown("storage", look.classes)
        return
    names = [one["metadata"]["name"] for one in look.classes]
    default = default_class(look.classes)
    if not names:
        yield Check(
            "storage", None, "there are no storage classes: volumes are made by hand (stoker volume create --pv)"
        )
    elif default is None:
        fix = "a claim then names its class: stoker volume create --class …"
        yield Check("storage", None, f"classes: {', '.join(sorted(names))}; none is the default", fix)
    else:
        rest = sorted(set(names) - {default["metadata"]["name"]})
        more = f"; also {', '.join(rest)}" if rest else ""
        yield Check("storage", True, f"{default['metadata']['name']} is the default class{more}")


def of_claims(wanted: Wants, look: Look) -> Iterator[Check]:
    """Judge each claim: whether it is there or can be, and whether all who mount it can."""
    mounts = wanted.mounts
    for name in dict.fromkeys([*mounts, *wanted.made]):
        what, found, who = f"claim {name}", look.claims.get(name), mounts.get(name, [])
        if isinstance(found, StokerError):
            yield unknown(what, found)
        elif found is None and name in wanted.made:
            yield _of_new_claim(what, wanted.made[name], who, look)
        elif found is None:
            fix = f"stoker volume create {name} --size …, or checkpoint.create: true for the one of checkpoints"
            yield missing(what, f"there is no claim {name} in {look.namespace}", fix)
        else:
            yield _of_claim(what, found, who, look)


def _of_new_claim(what: str, made: Manifest, who: Sequence[tuple[Group, bool]], look: Look) -> Check:
    """Judge whether a claim that is made with the job would get a volume."""
    modes = made["spec"]["accessModes"]
    if clash := _clash(what, modes, who):
        return clash
    size = quantity(made["spec"]["resources"]["requests"]["storage"])
    told = f"is made with the job: {format_bytes(float(size))}, {short_access(modes)}"
    if isinstance(look.classes, StokerError):
        return Check(what, None, f"{told}; whether it gets a volume is not known: {look.classes.what}")
    asked = made["spec"].get("storageClassName")
    one = default_class(look.classes) if asked is None else class_named(look.classes, asked)
    if asked and one is None:
        known = ", ".join(sorted(each["metadata"]["name"] for each in look.classes)) or "there are none"
        return missing(what, f"is to be of the class {asked}, which is not there", f"name another: {known}")
    if one is None or one.get("provisioner") == BY_HAND:
        return _of_static(what, told, made, one, look)
    if ACCESS["rwx"] in modes and one.get("provisioner") in ONE_NODE:
        name = one["metadata"]["name"]
        fix = "make it of a class for shared files (EFS, Filestore, NFS): stoker volume create --class … --access rwx"
        return missing(what, f"is to be rwx, and volumes of class {name} are for one node", fix)
    return Check(what, True, f"{told}, of class {one['metadata']['name']}")


def _of_static(what: str, told: str, made: Manifest, one: Manifest | None, look: Look) -> Check:
    """Look for a volume that somebody made by hand."""
    if isinstance(look.volumes, StokerError):
        return Check(what, None, f"{told}; no class makes volumes for it, and those by hand are not known")
    name = "" if one is None else one["metadata"]["name"]
    size, modes = quantity(made["spec"]["resources"]["requests"]["storage"]), set(made["spec"]["accessModes"])
    for volume in look.volumes:
        spec = volume["spec"]
        if (
            phase_of(volume) == "Available"
            and (spec.get("storageClassName") or "") == name
            and modes <= set(spec.get("accessModes") or ())
            and quantity((spec.get("capacity") or {}).get("storage", "0")) >= size
        ):
            return Check(what, True, f"{told}, from the volume {volume['metadata']['name']}")
    why = "no storage class is the default" if one is None else f"class {name} makes no volumes"
    fix = "stoker volume create … --class …, or --pv for a volume that is made by hand"
    return missing(what, f"would wait for ever: {why}, and no volume that is there fits", fix)


def _of_claim(what: str, claim: Manifest, who: Sequence[tuple[Group, bool]], look: Look) -> Check:
    """Judge a claim that is there."""
    name, status = claim["metadata"]["name"], claim.get("status") or {}
    modes = status.get("accessModes") or claim["spec"].get("accessModes") or []
    if is_ending(claim):
        return missing(what, "is being deleted", "wait until it is gone, or name another")
    if clash := _clash(what, modes, who):
        return clash
    short, phase = short_access(modes), phase_of(claim)
    if phase == "Lost":
        return missing(what, "has lost its volume", "the volume is gone: make another claim (stoker volume create)")
    if phase == "Pending":
        return _of_pending(what, claim, short, look)
    size = quantity((status.get("capacity") or {}).get("storage", "0"))
    told = (
        f"{format_bytes(float(size))}, {short}; {counted(sum(group.count for group, _ in who), 'pod')} would mount it"
    )
    if set(modes) <= {ACCESS["rox"]} and not all(reads for _, reads in who):
        return Check(what, None, told, "it can only be read: set read_only: true for it")
    holders = [] if isinstance(look.own_pods, StokerError) else mounters(look.own_pods, name)
    if holders and not SHARED & set(modes):
        pods = some([f"{one.pod} on {one.node}" if one.node else one.pod for one in holders])
        return Check(what, None, f"{told}; mounted now by {pods}", "the job would wait for that node, or for their end")
    return Check(what, True, told)


def _of_pending(what: str, claim: Manifest, short: str, look: Look) -> Check:
    """Say why a claim has no volume yet; that it waits for its first pod is as it should be."""
    name = claim["metadata"]["name"]
    classes = () if isinstance(look.classes, StokerError) else look.classes
    kind = class_named(classes, claim["spec"].get("storageClassName")) or {}
    known = look.claim_events.get(name, ())
    events = [] if isinstance(known, StokerError) else list(newest(own(claim, CLAIM, known)))
    bad = [one for one in events if is_warning(one)]
    if waits_for_pod(claim, classes) and kind.get("provisioner") != BY_HAND and not bad:
        return Check(what, True, f"{short}; gets its volume with its first pod")
    texts = [str(one.get("message", "")).strip() for one in bad or events]
    why = texts[0] if texts else "no event says why"
    return missing(what, f"has no volume yet: {why}", f"kubectl describe pvc {name} -n {look.namespace}")


def _clash(what: str, modes: Sequence[str], who: Sequence[tuple[Group, bool]]) -> Check | None:
    """Refuse a claim that fewer can mount than want to."""
    pods = sum(group.count for group, _ in who)
    if pods < 2 or not modes or SHARED & set(modes):
        return None
    roles = ", ".join(f"{group.count} × {group.role}" for group, _ in who)
    one = "pod" if modes == [ACCESS["rwop"]] else "node"
    told = f"is {short_access(modes)}, for one {one}, and {pods} pods mount it ({roles})"
    fix = "use a claim that is rwx (stoker volume create --access rwx), or a bucket"
    return missing(what, told, fix)
