"""`python -m graftrl` is the command line."""

from graftrl.cli import main

main()
