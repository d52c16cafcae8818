"""Code that is sent to other machines and runs there on the standard library alone, Python 3.8 or later."""
