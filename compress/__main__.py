"""`python -m compress` is the command `compress`."""

from compress.cli import main

main()
