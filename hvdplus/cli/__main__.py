"""Lets `python -m hvdplus.cli` do what the console script `hvdplus` does."""

from hvdplus.cli import main

main()
