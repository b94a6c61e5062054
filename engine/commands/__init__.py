"""The commands of `ssd-engine`."""


def run() -> None:
    """Run `ssd-engine`; an interruption (Ctrl-C) while modules are imported is printed as one line, too."""
    from ssd.errors import exit_with_message

    with exit_with_message():
        from engine.commands.main import cli

        cli()
