"""The site of a store: static files that show its runs, models, schedules and results."""
