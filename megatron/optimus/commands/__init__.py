"""The subcommands of ``optimus``, one module each.

A module's docstring is the text of ``--help``; ``main(argv)`` returns the exit code: 0, or 2 after a line that begins
with "error:", unless the docstring says otherwise. cli.py has the table of subcommands.
"""
