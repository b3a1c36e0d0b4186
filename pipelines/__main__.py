"""`python -m pipelines` is `vitflow`."""

from pipelines.cli import main

if __name__ == "__main__":
    main()
