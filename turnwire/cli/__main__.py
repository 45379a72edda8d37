"""`python -m turnwire.cli`."""

from turnwire.cli import main

main()
