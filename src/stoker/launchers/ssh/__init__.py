"""Jobs on hosts that `ssh` reaches: `launcher`, `look`, `slot` and `errands` are here; the rest is sent there."""
