"""The subcommands of ``optimus``: one file each, with ``main(argv) -> exit code``."""
