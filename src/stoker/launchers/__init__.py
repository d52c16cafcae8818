"""Where jobs run, each place in a file of its own."""
