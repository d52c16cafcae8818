"""`python -m stoker`."""

from stoker.cli.main import main

main()
