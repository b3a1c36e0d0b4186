"""What runs, in which order, where: recipes, keys, the store, the plan and the driver. Free of torch and ray at import."""
