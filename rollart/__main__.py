"""`python -m rollart` is the command line."""

from rollart.cli import main

main(prog_name="rollart")
