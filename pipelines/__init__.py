"""What runs, in which order, where: recipes, keys, the store, the plan, the driver. Imports neither torch nor ray."""
