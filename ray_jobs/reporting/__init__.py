"""The parts of the report: measures and verdicts (numpy), pictures, plots, provenance, the page."""
