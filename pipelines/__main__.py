"""The command `vitflow`, and `python -m pipelines` where that is not on the PATH."""

import gc


def main() -> None:
    """Import the command line and run it.

    What an import makes lives until the end, so no garbage is looked for meanwhile, nor among it later: that took a
    sixth of a rerun with nothing to do.
    """
    gc.disable()
    from pipelines.cli import main as command_line

    gc.freeze()
    gc.enable()
    command_line()


if __name__ == "__main__":
    main()
