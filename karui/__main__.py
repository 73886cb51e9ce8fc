"""`python -m karui`."""

from karui.cli import main

main()
