"""The command line `ssd-drafter`."""


def run() -> None:
    """Run `ssd-drafter`; an interruption (Ctrl-C) while modules are imported is printed as one line, too."""
    from ssd.errors import exit_with_message

    with exit_with_message():
        from drafter_service.commands.main import cli

        cli()
