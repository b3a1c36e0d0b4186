"""The parts of `benchmarks/loader.py`: the images, the loaders, what is measured and what must be right, the tables."""
