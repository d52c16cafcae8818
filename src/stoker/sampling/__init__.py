"""Which sample comes when, and to whom: pure functions of numbers, blind to the world until positions are dealt."""
