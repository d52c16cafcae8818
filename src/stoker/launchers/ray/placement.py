"""How many bundles fit into the nodes of a Ray cluster, and why a gang is not placed. Pure."""

from collections.abc import Mapping, Sequence

Resources = dict[str, float]
"""Amounts by the name of the resource, of a bundle or of a node."""


def fits_per_node(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float]) -> list[int]:
    """Return how many of a bundle fit into each node; reported amounts are rounded, above all those of memory."""
    return [min(int(node.get(name, 0) / amount + 1e-3) for name, amount in bundle.items()) for node in nodes]


def count_fitting(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float], strategy: str) -> int:
    """Return how many of a bundle fit into all nodes together."""
    fits = fits_per_node(nodes, bundle)
    if strategy == "STRICT_PACK":
        return max(fits)
    return sum(count > 0 for count in fits) if strategy == "STRICT_SPREAD" else sum(fits)


def explain_no_capacity(
    bundles: list[Resources], strategy: str, nodes: list[Resources], free: Resources
) -> tuple[str, bool]:
    """Return why the bundles are not placed, with needed and free amounts, and whether the cluster is too small."""
    total = sum_bundles(nodes)
    amounts = "; ".join(
        f"needs {_format_amount(name, amount)}, "
        f"{_format_amount(name, free.get(name, 0))} of {_format_amount(name, total.get(name, 0))} free"
        for name, amount in sum_bundles(bundles).items()
    )
    reason, is_too_small = placement_obstacle(bundles, strategy, nodes, free)
    return f"{reason} ({amounts})", is_too_small


def sum_bundles(bundles: list[Resources]) -> Resources:
    """Return the resources of several bundles together."""
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in sorted(frozenset().union(*bundles))}


def placement_obstacle(
    bundles: list[Resources], strategy: str, alive: list[Resources], free: Resources
) -> tuple[str, bool]:
    """Return what prevents the placement of the bundles, and whether the whole cluster is surely too small."""
    fitting = [(bundles.count(bundle), fits_per_node(alive, bundle)) for bundle in bundles]
    needed = sum_bundles(bundles)
    large_enough = min(sum(fits > 0 for fits in nodes) for _, nodes in fitting)
    if not large_enough:
        return "no node is large enough for one worker", True
    is_spread = len(alive) >= len(bundles) and all(sum(fits > 0 for fits in nodes) >= count for count, nodes in fitting)
    if strategy == "STRICT_SPREAD" and not is_spread:
        return f"strict_spread needs {len(bundles)} nodes, {large_enough} are large enough", True
    if strategy == "STRICT_PACK" and not count_fitting(alive, needed, strategy):
        return "strict_pack needs one node for all workers, none is large enough", True
    is_short = any(sum_bundles(alive).get(name, 0) + 1e-6 < amount for name, amount in needed.items())
    if is_short or any(sum(nodes) < count for count, nodes in fitting):
        return "the cluster is too small", True
    if all(free.get(name, 0) >= amount for name, amount in needed.items()):
        return f"the free resources are on nodes where {strategy.lower()} does not fit", False
    return "resources are in use by other jobs", False


def _format_amount(name: str, value: float) -> str:
    return f"{value / 2**30:.1f} GiB memory" if name == "memory" else f"{value:g} {name}"
