"""Pretraining objectives, each a module around the model that returns a loss, and the losses of classifiers."""
