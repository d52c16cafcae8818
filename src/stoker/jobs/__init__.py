"""Jobs: the file that says what to train, with what, and where."""
