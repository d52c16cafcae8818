"""Why a gang is not placed."""

from stoker.launchers.ray.placement import placement_obstacle


def test_placement_obstacles() -> None:
    nodes = [{"CPU": 2.0}, {"CPU": 2.0}]
    for bundle, count, strategy, free, expected, is_too_small in (
        ({"CPU": 3}, 1, "PACK", {}, "no node is large enough", True),
        ({"CPU": 2}, 3, "PACK", {}, "cluster is too small", True),
        ({"CPU": 2}, 2, "PACK", {"CPU": 2}, "in use", False),
        ({"CPU": 2}, 1, "PACK", {"CPU": 2}, "where pack does not fit", False),
        ({"CPU": 1}, 3, "STRICT_SPREAD", {"CPU": 4}, "strict_spread needs 3 nodes, 2 are", True),
        ({"CPU": 1}, 3, "STRICT_PACK", {"CPU": 4}, "strict_pack needs one node", True),
    ):
        obstacle = placement_obstacle([bundle] * count, strategy, nodes, free)  # type: ignore[arg-type]
        assert expected in obstacle[0]
        assert obstacle[1] is is_too_small


def test_placement_obstacles_of_unequal_bundles() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 1.0}]
    for sizes, strategy, expected, is_too_small in (
        ((4, 1), "STRICT_SPREAD", "where strict_spread does not fit", False),
        ((4, 4), "PACK", "cluster is too small", True),
        ((3, 1, 2), "PACK", "cluster is too small", True),
        ((5, 1), "PACK", "no node is large enough", True),
        ((1, 1, 1), "STRICT_SPREAD", "strict_spread needs 3 nodes", True),
        ((2, 2), "STRICT_SPREAD", "strict_spread needs 2 nodes, 1 are", True),
        ((4, 1), "STRICT_PACK", "strict_pack needs one node", True),
        ((3, 1), "STRICT_PACK", "where strict_pack does not fit", False),
    ):
        bundles = [{"CPU": float(size)} for size in sizes]
        obstacle = placement_obstacle(bundles, strategy, nodes, {"CPU": 5.0})
        assert expected in obstacle[0], (sizes, strategy, obstacle)
        assert obstacle[1] is is_too_small, (sizes, strategy)
