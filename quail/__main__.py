"""`python -m quail` is the command `quail`."""

from quail.cli import main

main()
