"""The subcommands of ``optimus``, one module each; pretrain.py and launch.py are beside this folder.

A module's docstring is the text of ``--help``; ``main(argv)`` returns the exit code: 0, or 2 after a line that begins
with "error:", unless the docstring says otherwise. A new subcommand is a module like train_tokenizer.py and a line in
the table ``COMMANDS`` of cli.py. It parses with ``Parser`` of config/load.py, whose mistakes are ConfigErrors, and
``prints_errors`` of platform/log.py names the errors that are the user's: every other one is a traceback.
"""
