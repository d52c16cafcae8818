"""What everything else stands on: specs, registry, units, processes."""
