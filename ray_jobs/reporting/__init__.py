"""The parts of the report: measures and verdicts (numpy), pictures, plots, the account of how it was made, the page."""
