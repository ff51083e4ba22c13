"""The command `coldpress`, with one module per group of commands.

May import: all of freezer. Importing it imports neither torch nor freezer.freezing.
Read first: app.py.
"""

from freezer.cli.app import main

__all__ = ["main"]
