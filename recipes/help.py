"""How all commands print their `--help`."""

from argparse import RawDescriptionHelpFormatter

from jsonargparse import DefaultHelpFormatter


class Help(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of a description as they were written."""
