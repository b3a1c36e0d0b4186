"""The command `vitflow`, and `python -m pipelines` if that is not on the PATH."""

import gc


def main() -> None:
    """Import the command line and run it.

    The garbage collector is off during the import, and skips the imported objects afterwards, because they live until
    the process ends. Collecting among them took a sixth of the time of a cached rerun.
    """
    gc.disable()  # before the import
    from pipelines.cli import main as command_line

    gc.freeze()
    gc.enable()
    command_line()


if __name__ == "__main__":
    main()
