"""`python -m freezer.cli`: the command `coldpress`."""

from freezer.cli.app import main

main()
